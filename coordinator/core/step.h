// The coordinator's decisions (CONTROL-PLANE, the table). Pure: equal states, events and times give
// equal results.
#pragma once

#include "coordinator/core/event.h"
#include "coordinator/core/state.h"

namespace upipe::coordinator {

// Applies `event` to `state` in place and returns what must be written and, once that is durable,
// done.
Actions Step(State& state, const Event& event, Moment now);

}  // namespace upipe::coordinator
