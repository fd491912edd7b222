// Times of work on a stream, by the device's clock, and of calls, by the host's.
#pragma once

#include "support/device.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

inline double median(std::vector<double> values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

/// A point of a stream whose time can be asked for. Lives in the context that is current.
class Event {
public:
    Event() { DRIVER(cuEventCreate(&event_, 0)); }
    ~Event() { DRIVER(cuEventDestroy_v2(event_)); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    void record(CUstream stream) { DRIVER(cuEventRecord(event_, stream)); }
    void wait() const { DRIVER(cuEventSynchronize(event_)); }

    double seconds_since(const Event& start) const {
        float milliseconds = 0;
        DRIVER(cuEventElapsedTime(&milliseconds, start.event_, event_));
        return double{milliseconds} / 1e3;
    }

private:
    CUevent event_ = nullptr;
};

/// How often something is run: `repeats` times in a row for one time, of which there are `rounds`.
struct Effort {
    std::size_t rounds;
    std::size_t repeats;
};

struct Pair {
    double ours_s;
    double drivers_s;
};

/// Medians of two calls that put work on the stream, in turns, so that what else the machine does
/// hits both. Needs a current context.
template <typename Ours, typename Drivers>
Pair time_in_turns(CUstream stream, Effort effort, const Ours& ours, const Drivers& drivers) {
    Event start, stop;
    const auto time = [&](const auto& call) {
        start.record(stream);
        for (std::size_t i = 0; i < effort.repeats; ++i) call();
        stop.record(stream);
        stop.wait();
        return stop.seconds_since(start) / static_cast<double>(effort.repeats);
    };
    std::vector<double> ours_s, drivers_s;
    for (std::size_t round = 0; round <= effort.rounds; ++round) {
        const double drivers_time = time(drivers);
        const double ours_time = time(ours);
        if (round > 0) {  // the first is for warming up
            drivers_s.push_back(drivers_time);
            ours_s.push_back(ours_time);
        }
    }
    return {median(ours_s), median(drivers_s)};
}

/// Median nanoseconds that a call keeps the host, on a stream that is idle before. `prepare` is not
/// timed. Needs a current context.
template <typename Prepare, typename Call>
double host_ns(CUstream stream, std::size_t rounds, const Prepare& prepare, const Call& call) {
    using Clock = std::chrono::steady_clock;
    std::vector<double> times;
    for (std::size_t round = 0; round < rounds + rounds / 4; ++round) {
        prepare();
        DRIVER(cuStreamSynchronize(stream));
        const Clock::time_point begin = Clock::now();
        call();
        const std::chrono::duration<double, std::nano> took = Clock::now() - begin;
        if (round >= rounds / 4) times.push_back(took.count());
    }
    DRIVER(cuStreamSynchronize(stream));
    return median(times);
}
