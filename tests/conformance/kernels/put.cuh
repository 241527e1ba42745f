// SPDX-License-Identifier: Apache-2.0
// Puts and what a signal proves about them: strong ones cover everything before them on their
// context to their peer, weak ones their own put.
#pragma once

#include "conformance/kernels/kit.cuh"
#include "conformance/kernels/start.cuh"

namespace marrow::conformance {

MARROW_KERNEL put_signal(Args a) {
  with_group(a, [&](const auto& coop) {
    exchange(a, coop, [&](const auto& gin, std::int64_t it) {
      return send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
        return gin.put(peer, a.inbox, to, source_region(a), from, a.bytes,
                       SignalAdd{data_signal(a, a.comm.rank)}, coop);
      });
    });
  });
}

MARROW_KERNEL weak_signal(Args a) {
  with_group(a, [&](const auto& coop) {
    exchange(a, coop, [&](const auto& gin, std::int64_t it) {
      return send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
        return gin.put(peer, a.inbox, to, source_region(a), from, a.bytes,
                       SignalAdd{data_signal(a, a.comm.rank), 1, Strength::weak}, coop);
      });
    });
  });
}

/// The message in five pieces of uneven size, the last first; the signal comes alone, after all.
MARROW_KERNEL puts_signal(Args a) {
  with_group(a, [&](const auto& coop) {
    exchange(a, coop, [&](const auto& gin, std::int64_t it) {
      const bool sent = send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
        for (int piece = 4; piece >= 0; --piece) {
          const std::uint64_t begin = a.bytes * piece / 5;
          const std::uint64_t end = a.bytes * (piece + 1) / 5;
          const Status status =
              gin.put(peer, a.inbox, to + begin, source_region(a), from + begin, end - begin, coop);
          if (status != Status::ok) return status;
        }
        return Status::ok;
      });
      pause(a, it, 3);
      return sent && each_peer(a, it, [&](int peer) {
               return gin.signal(peer, SignalAdd{data_signal(a, a.comm.rank)}, coop);
             });
    });
  });
}

template <int kBytes>
struct Value {
  std::uint8_t byte[kBytes];
};
template <int kBytes>
MARROW_DEVICE Value<kBytes> value_at(std::uint64_t key, std::uint64_t i) {
  Value<kBytes> value;
  for (int j = 0; j < kBytes; ++j) value.byte[j] = pattern(key, i + j);
  return value;
}

/// Values of every legal size class side by side, aligned and not, and adds to a word; then one
/// strong signal. The case's message has 1+2+3+4+7+8+12+15+16+23+24 = 115 bytes.
MARROW_KERNEL values_signal(Args a) {
  const Block coop;
  exchange(
      a, coop,
      [&](const auto& gin, std::int64_t it) {
        return each_peer(a, it, [&](int peer) {
          const std::uint64_t key = key_of(a, a.comm.rank, peer, it);
          const std::uint64_t to = inbox_offset(a, a.comm.rank);
          std::uint64_t at = 0;
          Status status = Status::ok;
          const auto value = [&]<int kBytes>() {
            status = worse(status,
                           gin.put_value(peer, a.inbox, to + at, value_at<kBytes>(key, at), coop));
            at += kBytes;
          };
          value.template operator()<1>();
          value.template operator()<2>();
          value.template operator()<3>();
          value.template operator()<4>();
          value.template operator()<7>();
          value.template operator()<8>();
          status = worse(status, gin.add(peer, a.inbox, word_offset(a, a.comm.rank), it + 5, coop));
          value.template operator()<12>();
          value.template operator()<15>();
          value.template operator()<16>();
          value.template operator()<23>();
          value.template operator()<24>();
          status = worse(status, gin.add(peer, a.inbox, word_offset(a, a.comm.rank), 1, coop));
          return worse(status, gin.signal(peer, SignalAdd{data_signal(a, a.comm.rank)}, coop));
        });
      },
      [&](const auto& gin, int source, std::int64_t it) {
        const Status status = gin.wait_signal(data_signal(a, source), it + 1, coop);
        const std::uint64_t rounds = it + 1;
        const std::uint64_t sum = rounds * (rounds - 1) / 2 + 6 * rounds;
        if (coop.rank() == 0) {
          same(a, load_relaxed<Scope::system>(own_word(a, source)), sum, it, source);
        }
        return status;
      });
}

/// Action on a word of the window instead of a signal; even rounds with the put, odd rounds alone.
MARROW_KERNEL signal_at(Args a) {
  const Block coop;
  exchange(
      a, coop,
      [&](const auto& gin, std::int64_t it) {
        return send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
          const SignalAt action{a.inbox, word_offset(a, a.comm.rank), 3};
          if (it % 2 == 0) {
            return gin.put(peer, a.inbox, to, source_region(a), from, a.bytes, action, coop);
          }
          const Status status = gin.put(peer, a.inbox, to, source_region(a), from, a.bytes, coop);
          return worse(status, gin.signal(peer, action, coop));
        });
      },
      [&](const auto&, int source, std::int64_t it) {
        const std::uint64_t want = static_cast<std::uint64_t>(it + 1) * 3;
        Status status = Status::ok;
        if (coop.rank() == 0) {
          status = wait_until(a.comm, {},
                              [&] { return observe<Scope::system>(own_word(a, source)) >= want; });
          if (status == Status::ok)
            same(a, observe<Scope::system>(own_word(a, source)), want, it, source);
        }
        return coop.agree(status);
      });
}

/// A strong signal also covers adds before it, wherever they travel; many adds, then the signal.
MARROW_KERNEL adds_signal(Args a) {
  const Block coop;
  exchange(
      a, coop,
      [&](const auto& gin, std::int64_t it) {
        return send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
          Status status = Status::ok;
          for (int i = 0; i < 8; ++i) {
            status = worse(
                status, gin.add(peer, a.inbox, word_offset(a, a.comm.rank * 8 + i), i + 1, coop));
          }
          return worse(status, gin.put(peer, a.inbox, to, source_region(a), from, a.bytes,
                                       SignalAdd{data_signal(a, a.comm.rank), 1}, coop));
        });
      },
      [&](const auto& gin, int source, std::int64_t it) {
        const Status status = gin.wait_signal(data_signal(a, source), it + 1, coop);
        for (int i = coop.rank(); i < 8; i += coop.size()) {
          same(a, load_relaxed<Scope::system>(own_word(a, source * 8 + i)),
               static_cast<std::uint64_t>(i + 1) * (it + 1), it, source, i);
        }
        return status;
      });
}

/// Signals that add more than one, from a group as small as a tile.
MARROW_KERNEL tile_signal(Args a) {
  const Tile<2> coop;
  if (thread_index() >= coop.width()) return;
  exchange(
      a, coop,
      [&](const auto& gin, std::int64_t it) {
        return send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
          return gin.put(peer, a.inbox, to, source_region(a), from, a.bytes, coop,
                         SignalAdd{data_signal(a, a.comm.rank), 7});
        });
      },
      [&](const auto& gin, int source, std::int64_t it) {
        const auto want = static_cast<std::uint64_t>(it + 1) * 7;
        const Status status = gin.wait_signal(data_signal(a, source), want, coop);
        same(a, gin.read_signal(data_signal(a, source)), want, it, source);
        return status;
      });
}

/// Only doorbell `deferred` until the last operation (odd rounds) or the flush (even rounds).
MARROW_KERNEL deferred(Args a) {
  with_group(a, [&](const auto& coop) {
    exchange(a, coop, [&](const auto& gin, std::int64_t it) {
      const bool sent = send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
        const std::uint64_t half = a.bytes / 2;
        Status status =
            gin.put(peer, a.inbox, to, source_region(a), from, half, coop, Doorbell::deferred);
        status = worse(status, gin.put(peer, a.inbox, to + half, source_region(a), from + half,
                                       a.bytes - half, Doorbell::deferred, coop));
        return worse(status, gin.signal(peer, SignalAdd{data_signal(a, a.comm.rank)}, coop,
                                        it % 2 ? Doorbell::now : Doorbell::deferred));
      });
      if (it % 2 || !sent) return sent;
      return ok(a, gin.flush(coop), it, -1);
    });
  });
}

/// The caller has released its source already and says so.
MARROW_KERNEL released(Args a) {
  const Block coop;
  exchange(a, coop, [&](const auto& gin, std::int64_t it) {
    return send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
      settle<Scope::system>();
      coop.sync();
      const Ordering ordering{Ordering::Released::system};
      return gin.put(peer, a.inbox, to, source_region(a), from, a.bytes,
                     SignalAdd{data_signal(a, a.comm.rank)}, coop, ordering);
    });
  });
}

/// More operations than a queue has entries, without waiting: 8-byte values to 200 places.
MARROW_KERNEL burst(Args a) {
  const Block coop;
  exchange(a, coop, [&](const auto& gin, std::int64_t it) {
    return each_peer(a, it, [&](int peer) {
      const std::uint64_t key = key_of(a, a.comm.rank, peer, it);
      Status status = Status::ok;
      for (std::uint64_t i = 0; i * 8 < a.bytes; ++i) {
        status = worse(
            status, gin.put_value(peer, a.inbox, inbox_offset(a, a.comm.rank) + i * 8, mix(key + i),
                                  coop, i % 5 ? Doorbell::deferred : Doorbell::now));
      }
      return worse(status, gin.signal(peer, SignalAdd{data_signal(a, a.comm.rank)}, coop));
    });
  });
}

/// Every thread posts for itself: a value of 16 bytes to its own place with a signal of 1 each. How
/// many threads post at once follows the sharing mode. `bytes` is 16 a thread of all ranks' grids.
MARROW_KERNEL posters(Args a) {
  const bool every_block = a.comm.sharing == Sharing::device;
  const bool every_thread = a.comm.sharing != Sharing::thread;
  if (!every_block && block_index() != 0) return;
  if (!every_thread && thread_index() != 0) return;
  const int n = every_thread ? block_size() * (every_block ? grid_size() : 1) : 1;
  const int me = every_block ? block_index() * block_size() + thread_index() : thread_index();
  const Ops<> gin(a.comm, a.context);
  for (std::int64_t it = 0; it < a.iterations; ++it) {
    pause(a, it, me);
    const bool sent = each_peer(a, it, [&](int peer) {
      const std::uint64_t key = key_of(a, a.comm.rank, peer, it);
      const std::uint64_t at = static_cast<std::uint64_t>(me) * 16;
      const std::uint64_t value[2] = {mix(key + at / 8), mix(key + at / 8 + 1)};
      return gin.put_value(peer, a.inbox, inbox_offset(a, a.comm.rank) + at, value,
                           SignalAdd{data_signal(a, a.comm.rank)});
    });
    if (!sent) return;
    // Each thread checks its own 16 bytes of every source, and says so with one more signal.
    for (int source = 0; source < a.comm.nranks; ++source) {
      const auto all = static_cast<std::uint64_t>(it + 1) * n;
      if (!ok(a, gin.wait_signal(data_signal(a, source), all), it, source)) return;
      std::byte* mine = inbox_slot(a, source) + me * 16;
      const std::uint64_t key = key_of(a, source, a.comm.rank, it) + me * 2;
      verify(a, Thread{}, mine, 16, key, it, source);
      poison(Thread{}, mine, 16, it + 1);
      if (!ok(a, gin.signal(source, SignalAdd{ack_signal(a, a.comm.rank)}), it, source)) return;
    }
    for (int peer = 0; peer < a.comm.nranks; ++peer) {
      const auto all = static_cast<std::uint64_t>(it + 1) * n;
      if (!ok(a, gin.wait_signal(ack_signal(a, peer), all), it, peer)) return;
    }
  }
}

/// The operations of an ExclusiveQueue, each compiled once.
class Held {
 public:
  MARROW_DEVICE Held(const Args& a, int peer) : queue_(Gin<>(a.comm, a.context).exclusive(peer)) {}

  template <class... O>
  MARROW_CASE_FUNCTION Status put(const WindowHandle& window, std::uint64_t to,
                                  const Region& source, std::uint64_t from, std::uint64_t bytes,
                                  const O&... options) {
    return queue_.put(window, to, source, from, bytes, options...);
  }
  MARROW_CASE_FUNCTION Status put_value(const WindowHandle& window, std::uint64_t to,
                                        std::uint64_t value) {
    return queue_.put_value(window, to, value);
  }
  MARROW_CASE_FUNCTION Status get(const WindowHandle& window, std::uint64_t from,
                                  const Region& target, std::uint64_t to, std::uint64_t bytes) {
    return queue_.get(window, from, target, to, bytes);
  }
  MARROW_CASE_FUNCTION Status words(const WindowHandle& window, std::uint64_t at, std::uint64_t n,
                                    std::uint64_t* old, std::uint64_t* older) {
    Status status = queue_.add(window, at, n);
    status = worse(status, queue_.flush_remote());  // else the fetch may overtake it
    status = worse(status, queue_.fetch_add(window, at, n, old));
    return worse(status, queue_.compare_swap(window, at, *old + n, *old + 2 * n, older));
  }
  MARROW_CASE_FUNCTION Status signal(int id) { return queue_.signal(SignalAdd{id}); }
  MARROW_CASE_FUNCTION Status settle() {
    Request request;
    Status status = queue_.flush_async(&request);
    status = worse(status, queue_.wait(request));
    status = worse(status, queue_.test(request));
    status = worse(status, queue_.flush());
    return worse(status, queue_.flush_remote());
  }

 private:
  ExclusiveQueue<> queue_;
};

/// A thread holds its queue to each peer in turn: pieces of a message with and without doorbells, the last with the
/// signal.
MARROW_KERNEL held_puts(Args a) {
  const Thread coop;
  if (thread_index() != 0 || block_index() != 0) return;
  exchange(a, coop, [&](const auto&, std::int64_t it) {
    return send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
      Held queue(a, peer);
      Status status = Status::ok;
      for (std::uint64_t piece = 4; piece > 0; --piece) {
        const std::uint64_t begin = a.bytes * piece / 5, end = a.bytes * (piece + 1) / 5;
        status =
            worse(status, queue.put(a.inbox, to + begin, source_region(a), from + begin,
                                    end - begin, piece % 2 ? Doorbell::deferred : Doorbell::now));
      }
      return worse(status, queue.put(a.inbox, to, source_region(a), from, a.bytes / 5,
                                     SignalAdd{data_signal(a, a.comm.rank)}));
    });
  });
}

/// Every other operation of a held queue, between puts; and what a holder leaves behind is the next one's.
MARROW_KERNEL held_operations(Args a) {
  const Thread coop;
  if (thread_index() != 0 || block_index() != 0) return;
  exchange(a, coop, [&](const auto&, std::int64_t it) {
    return send_each(a, coop, it, [&](int peer, std::uint64_t from, std::uint64_t to) {
      const auto round = static_cast<std::uint64_t>(it);
      const std::uint64_t word = word_offset(a, static_cast<std::uint64_t>(a.comm.rank) * 2);
      std::uint64_t old = 0, older = 0;
      Held first(a, peer);
      Status status =
          first.put(a.inbox, to, source_region(a), from, a.bytes / 2, Doorbell::deferred);
      status = worse(status, first.put_value(a.inbox, word + 8, round));
      status = worse(status, first.words(a.inbox, word, 3, &old, &older));
      same(a, old, 9 * round + 3, it, peer);
      same(a, older, 9 * round + 6, it, peer);
      status = worse(status, first.settle());
      Held second(a, peer);
      status = worse(status, second.put(a.inbox, to + a.bytes / 2, source_region(a),
                                        from + a.bytes / 2, a.bytes - a.bytes / 2));
      // What came there, back to where it came from.
      status = worse(status, second.get(a.inbox, to, source_region(a), from, a.bytes / 2));
      status =
          worse(status, second.settle());  // a signal covers puts; the peer writes there after it
      status = worse(status, second.signal(data_signal(a, a.comm.rank)));
      return worse(status, second.settle());
    });
  });
}

/// name, what breaks when it fails, kernel, traits, bytes, iterations
std::vector<Case> put_cases() {
  return {
      {"put_signal", "a strong signal covers its put", start<put_signal>, kSized | kGrouped},
      {"puts_signal", "a strong signal covers all puts before it", start<puts_signal>,
       kSized | kGrouped},
      {"weak_signal", "a weak signal covers its own put", start<weak_signal>, kSized | kGrouped},
      {"values_signal", "a strong signal covers values and adds", start<values_signal>,
       kWindowWords, 115},
      {"adds_signal", "a strong signal covers adds on the atomic path", start<adds_signal>,
       kWindowWords},
      {"signal_at", "SignalAt covers its put", start<signal_at>, kSized | kWindowWords},
      {"tile_signal", "a tile sends as one", start<tile_signal>},
      {"deferred", "deferred doorbells ring with the next operation or flush", start<deferred>,
       kSized | kGrouped},
      {"released", "a put after the caller's own release", start<released>, kSized},
      {"burst", "more operations than queue entries", start<burst>, 0, 1600, 5},
      {"held_puts", "a thread that holds its queue to a peer puts as others do", start<held_puts>,
       kSized},
      {"held_operations", "every operation of a held queue", start<held_operations>, kWindowWords},
      {"posters", "all threads post on one context", start<posters>, kManyPosters, 16 * 1024, 10},
  };
}

}  // namespace marrow::conformance
