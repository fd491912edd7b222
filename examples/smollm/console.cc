#include "console.h"

#include <cstdint>
#include <cstdio>

namespace smollm {

void Console::add_request(const std::string& title, std::size_t num_samples) {
    first_texts_.push_back(texts_.size());
    for (std::size_t sample = 0; sample < num_samples; ++sample) {
        std::string its_title = title;
        if (num_samples > 1) {
            its_title += " (" + std::to_string(sample + 1) + " of " +
                         std::to_string(num_samples) + ")";
        }
        texts_.push_back({its_title, Sampler(sampling_, texts_.size()), "", false});
    }
}

Console::Text& Console::text_of(const Sequence& sequence) {
    return texts_.at(first_texts_.at(sequence.request) + sequence.sample);
}

std::int32_t Console::choose(const Sequence& sequence, Logits logits) {
    return text_of(sequence).sampler.choose(logits);
}

void Console::on_token(const Sequence& sequence) {
    const std::int32_t token = sequence.tokens.back();
    if (!tokenizer_.is_special(token)) text_of(sequence).waiting += tokenizer_.bytes(token);
    print();
}

void Console::on_finished(const Sequence& sequence) {
    text_of(sequence).is_finished = true;
    print();
}

void Console::print() {
    for (; current_ < texts_.size(); ++current_, has_title_ = false) {
        Text& text = texts_[current_];
        if (!has_title_) std::printf("=== %s\n", text.title.c_str());
        has_title_ = true;
        std::fwrite(text.waiting.data(), 1, text.waiting.size(), stdout);
        text.waiting.clear();
        if (!text.is_finished) break;
        std::fputs("\n\n", stdout);
    }
    std::fflush(stdout);
}

void print_summary(const Server& server, const KvCache& cache, const CacheOptions& options) {
    const auto whole = [](std::uint64_t number) { return static_cast<unsigned long long>(number); };
    const ServerCounts& counts = server.counts();
    const engine::BlockPool& blocks = server.blocks();
    const std::uint64_t kernel_block_size =
        options.kernel_block_size != 0 ? options.kernel_block_size : options.block_size;
    std::printf("  tokens      %llu written, %llu read, %llu read again\n", whole(counts.new_tokens),
                whole(counts.computed_tokens), whole(counts.repeated_tokens));
    std::printf("  requests    %llu preempted, %llu forks, %llu more that had to wait\n",
                whole(counts.preemptions), whole(counts.forks), whole(counts.late_forks));
    std::printf("  time        %.2f s in %llu steps: %.1f tokens/s written, %.1f read\n",
                counts.seconds, whole(counts.steps),
                static_cast<double>(counts.new_tokens) / counts.seconds,
                static_cast<double>(counts.computed_tokens + counts.repeated_tokens) /
                    counts.seconds);
    std::printf("  blocks      %llu used, %llu at the peak, of %llu; %llu had an owner before\n",
                whole(blocks.num_held()), whole(blocks.largest_num_held()),
                whole(cache.num_usable_blocks()), whole(blocks.num_reused()));
    const std::string place = options.place.cuda ? " on " + options.place.name() : "";
    std::printf("  KV cache    %llu bytes%s: %s, %s, blocks of %llu tokens, kernel blocks of %llu\n",
                whole(cache.size_bytes()), place.c_str(), options.type.name, options.layout.name,
                whole(options.block_size), whole(kernel_block_size));
    std::printf("  kvpages     %.2f %% of the time of steps\n",
                100 * cache.seconds_in_kvpages() / counts.seconds);
}

}  // namespace smollm
