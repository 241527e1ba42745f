// SPDX-License-Identifier: Apache-2.0
// Events of completion queues that the verbs driver made: one message into a channel's pipe for each
// request (arm), and the asynchronous event of an overrun.
#pragma once

#include "softnic/queues.hpp"

namespace marrow::softnic {

struct Events {
  std::uint64_t number = 0;     ///< what an event names its completion queue by, never used twice
  int channel = -1;             ///< descriptor; -1: no completion channel
  int errors = -1;              ///< descriptor of the asynchronous events
  std::uint32_t answered = 0;   ///< arm word that an event was sent for
  std::uint32_t solicited = 0;  ///< `produced` behind the last solicited or error entry
};

/// Sends the event that the queue's arm word asks for, once for each request.
void answer_arm(CompletionQueue& cq);
/// After an attempt to post: remembers what arms ask about, answers them, reports an overrun.
void note_events(CompletionQueue& cq, const Completion& completion, bool posted);

}  // namespace marrow::softnic
