// A few threads that share the work of one loop at a time.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

namespace smollm {

/// Runs loops in parallel. One thread at a time may call it, and not from a body.
class ThreadPool {
public:
    /// The thread that calls run() is one of the `num_threads`.
    explicit ThreadPool(std::size_t num_threads) {
        if (num_threads == 0) throw std::invalid_argument("a thread pool needs a thread");
        try {
            while (size() < num_threads) workers_.emplace_back([this] { serve(); });
        } catch (...) {
            stop();  // the destructor of an object that was not made does not run
            throw;
        }
    }

    ~ThreadPool() { stop(); }

    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    std::size_t size() const { return workers_.size() + 1; }

    /// Calls `body(begin, end)` with disjoint ranges that cover [0, count) together. Returns when
    /// all are done; then throws what a body threw, the first if there were more.
    template <class F>
    void run(std::size_t count, F&& body) {
        if (workers_.empty() || count <= 1) {
            if (count > 0) body(std::size_t{0}, count);
        } else {
            run_on_all(count, std::ref(body));  // a reference: nothing is allocated
        }
    }

private:
    using Body = std::function<void(std::size_t begin, std::size_t end)>;

    void run_on_all(std::size_t count, const Body& body) {
        if (is_running_.exchange(true)) {
            throw std::logic_error("a thread pool was called from a body of its own");
        }
        body_ = &body;
        count_ = count;
        // Ranges small enough that a thread which came late does not have the others wait.
        range_size_ = std::max<std::size_t>(count / (size() * 4), 1);
        next_ = 0;
        error_ = nullptr;
        num_busy_ = workers_.size();
        start_round();
        take_ranges();
        await(finished_, [this] { return num_busy_ == 0; });
        is_running_ = false;
        if (error_) std::rethrow_exception(error_);
    }

    void stop() {
        is_stopping_ = true;
        start_round();
        for (std::thread& worker : workers_) worker.join();
    }

    void start_round() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            ++round_;
        }
        started_.notify_all();
    }

    /// What a worker does all its life.
    void serve() {
        for (std::uint64_t round = 1;; ++round) {
            await(started_, [&] { return round_ >= round; });
            if (is_stopping_) return;
            take_ranges();
            {
                const std::lock_guard<std::mutex> lock(mutex_);
                --num_busy_;
            }
            finished_.notify_one();
        }
    }

    void take_ranges() {
        try {
            for (;;) {
                const std::size_t begin = next_.fetch_add(range_size_);
                if (begin >= count_) return;
                (*body_)(begin, std::min(begin + range_size_, count_));
            }
        } catch (...) {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (!error_) error_ = std::current_exception();
        }
    }

    /// Waits until `is_true`, which must become so under the mutex. Within a model's step the wait
    /// is shorter than falling asleep and waking up, so it looks a while before it sleeps.
    template <class Condition>
    void await(std::condition_variable& changed, const Condition& is_true) {
        constexpr int kNumLooks = 200;
        for (int i = 0; i < kNumLooks; ++i) {
            if (is_true()) return;
            std::this_thread::yield();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        changed.wait(lock, is_true);
    }

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable started_, finished_;
    std::atomic<std::uint64_t> round_{0};
    std::atomic<std::size_t> num_busy_{0};
    std::atomic<bool> is_running_{false};
    std::atomic<bool> is_stopping_{false};

    // The loop of the round. The first three do not change while a worker is busy.
    const Body* body_ = nullptr;
    std::size_t count_ = 0;
    std::size_t range_size_ = 1;
    std::atomic<std::size_t> next_{0};
    std::exception_ptr error_;
};

}  // namespace smollm
