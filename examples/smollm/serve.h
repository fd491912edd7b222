// Requests that arrive one after the other, until all have ended.
#pragma once

#include "server.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <vector>

namespace smollm {

/// Serves prompts; they arrive in their order, `gap` steps apart. Steps without a request are passed
/// over. `request(number)` is what prompt `number` asks for; `accepted(number)` and
/// `refused(number, why)` are told of it, in the order of requests.
template <typename MakeRequest, typename Accepted, typename Refused>
void serve(Server& server, const std::vector<std::size_t>& order, std::size_t gap,
           MakeRequest request, Accepted accepted, Refused refused) {
    std::size_t next = 0;
    for (std::size_t step = 0; next < order.size() || server.is_busy(); ++step) {
        if (!server.is_busy()) step = std::max(step, next * gap);
        for (; next < order.size() && step >= next * gap; ++next) {
            try {
                server.add(request(order[next]));
                accepted(order[next]);
            } catch (const std::runtime_error& error) {
                refused(order[next], error.what());
            }
        }
        if (server.is_busy()) server.step();
    }
}

}  // namespace smollm
