// SPDX-License-Identifier: Apache-2.0
// Random WQEs posted by a kernel and compared with a plain model of the NIC that the kernel runs beside them: at the
// speed of the engine, where posting from the CPU (softnic_model.hpp) is a thousand times slower than a GPU engine.
// A block a queue; all its threads go through the same WQEs with the same random numbers, one of them posts and
// polls, all move bytes. After each batch both memories must be the model's. A queue's run ends with a mistake: its
// syndrome, the flushed WQEs behind it and the memory must be right too. Runs on the CPU device and on a GPU.
#pragma once

#include "marrow/abi/gda_queue.h"
#include "marrow/device.cuh"
#include "marrow/device/launch.cuh"

namespace marrow::softnic_posted {

inline constexpr std::uint32_t kBytes = 1024;  ///< of each side
inline constexpr std::uint32_t kGuard = 64;    ///< before and behind each
inline constexpr std::uint32_t kSide = kBytes + 2 * kGuard;
inline constexpr std::uint32_t kArea = 2 * kSide;  ///< of a queue: local side, then remote side
inline constexpr std::uint32_t kMostBatch = 96;

/// In host memory: what went wrong first; line 0: nothing.
struct Verdict {
  std::uint64_t posted, line, at, got, wanted;
};

/// What a batch expects of one completion.
struct Expected {
  std::uint16_t index;
  std::uint8_t syndrome;
};
struct Shared {
  std::uint8_t local[kSide];
  std::uint8_t remote[kSide];
  Expected expected[kMostBatch + 1];
  std::uint32_t wrong;  ///< 1: the verdict says what
};

class Poster {
 public:
  MARROW_DEVICE Poster(const DeviceCommunicator& comm, const WindowHandle& window,
                       std::uint64_t seed, Verdict* verdict)
      : comm_(comm), window_(window), shared_(*dynamic_shared<Shared>()), verdict_(verdict) {
    const auto queue = static_cast<std::uint64_t>(block_index());
    random_ = (seed + queue) * 0x9e3779b97f4a7c15ull + 1;
    auto* queues = reinterpret_cast<GdaQueue*>(const_cast<GdaDevice*>(comm.gda) + 1);
    queue_ = queues + queue * static_cast<std::uint64_t>(comm.nranks) + comm.rank;
    depth_ = std::uint32_t{queue_->mask} + 1;
    area_ = queue * kArea;
    memory_ = reinterpret_cast<std::uint8_t*>(window.local) + area_;
  }

  MARROW_DEVICE void run(std::uint64_t wqes, std::uint32_t good) {
    for (std::uint32_t i = thread_index(); i < kSide; i += block_size()) {
      const bool guard = i < kGuard || i >= kGuard + kBytes;
      shared_.local[i] = guard ? 0xee : static_cast<std::uint8_t>(i * 37 + random_);
      shared_.remote[i] = guard ? 0xee : static_cast<std::uint8_t>(i * 101 + (random_ >> 8));
      store_relaxed<Scope::system>(memory_ + i, shared_.local[i]);
      store_relaxed<Scope::system>(memory_ + kSide + i, shared_.remote[i]);
    }
    if (thread_index() == 0) shared_.wrong = 0;
    settle<Scope::system>();
    block_sync();
    bool failed = false;
    while (!failed) {
      const bool last = posted_ >= wqes;
      failed = batch(last ? 1 : good, last);
      if (!poll_all() || !equal()) break;
    }
    if (thread_index() == 0) verdict_->posted = posted_;
  }

 private:
  MARROW_DEVICE std::uint64_t next() {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return random_ * 0x2545f4914f6cdd1dull;
  }
  MARROW_DEVICE std::uint32_t below(std::uint32_t n) {
    return static_cast<std::uint32_t>((next() >> 32) * n >> 32);
  }

  struct Segment {
    std::uint32_t word[4];
  };
  MARROW_DEVICE static Segment of64(std::uint64_t a, std::uint64_t b) {
    using mlx5::to_big32;
    return {{to_big32(static_cast<std::uint32_t>(a >> 32)), to_big32(static_cast<std::uint32_t>(a)),
             to_big32(static_cast<std::uint32_t>(b >> 32)),
             to_big32(static_cast<std::uint32_t>(b))}};
  }
  /// @param at  in the remote side; may be outside, for mistakes
  MARROW_DEVICE Segment remote(std::uint64_t at, std::uint32_t wrong = 0) const {
    Segment s = of64(window_.gda_base[comm_.rank] + area_ + kSide + kGuard + at, 0);
    s.word[2] = window_.gda_rkey[comm_.rank] ^ wrong;
    return s;
  }
  MARROW_DEVICE Segment local(std::uint64_t at, std::uint32_t bytes,
                              std::uint32_t wrong = 0) const {
    Segment s = of64(0, window_.gda_local + area_ + kGuard + at);
    s.word[0] = mlx5::to_big32(bytes);
    s.word[1] = window_.gda_lkey ^ wrong;
    return s;
  }
  struct Wqe {
    Segment segment[4] = {};
    std::uint32_t ds = 1;
    std::uint8_t opcode = mlx5::kNop, opmod = 0, syndrome = mlx5::kNoError;
  };
  MARROW_DEVICE static void add(Wqe& w, const Segment& s) { w.segment[w.ds++] = s; }

  MARROW_DEVICE std::uint8_t* here() { return shared_.local + kGuard; }
  MARROW_DEVICE std::uint8_t* there() { return shared_.remote + kGuard; }
  /// Moves model bytes by all threads, after what earlier WQEs did to them.
  MARROW_DEVICE void move(std::uint8_t* to, const std::uint8_t* from, std::uint32_t bytes) {
    block_sync();
    for (std::uint32_t i = thread_index(); i < bytes; i += block_size()) to[i] = from[i];
    block_sync();
  }
  template <class Word>
  MARROW_DEVICE static Word load(const std::uint8_t* from) {
    Word value = 0;
    for (unsigned i = 0; i < sizeof(Word); ++i)
      value |= static_cast<Word>(Word{from[i]} << (8 * i));
    return value;
  }
  template <class Word>
  MARROW_DEVICE static void store(std::uint8_t* to, Word value) {
    for (unsigned i = 0; i < sizeof(Word); ++i) to[i] = static_cast<std::uint8_t>(value >> (8 * i));
  }

  /// One or two buffers of the local side. each(at, offset in the message, bytes)
  template <class Each>
  MARROW_DEVICE void buffers(Wqe& w, std::uint32_t bytes, Each&& each) {
    const std::uint32_t first = bytes > 1 && below(2) == 0 ? 1 + below(bytes - 1) : bytes;
    for (std::uint32_t done = 0; done < bytes;) {
      const std::uint32_t n = done == 0 ? first : bytes - done;
      const std::uint32_t at = below(kBytes - n + 1);
      add(w, local(at, n));
      each(at, done, n);
      done += n;
    }
  }

  /// Applies it to the model too.
  MARROW_DEVICE Wqe make() {
    Wqe w;
    const std::uint32_t kind = below(12);
    if (kind == 0) return w;
    if (kind == 1) {
      w.opcode = mlx5::kDump;
      add(w, local(0, 8));
    } else if (kind <= 3) {  // inline
      w.opcode = mlx5::kWrite;
      const std::uint32_t bytes = kind == 2 ? 4 * (1 + below(2)) : 1 + below(28);
      const std::uint32_t to = kind == 2 ? below(kBytes / 8) * 8 : below(kBytes - bytes);
      add(w, remote(to));
      const std::uint64_t payload = next();
      std::uint32_t words[8] = {mlx5::to_big32(bytes | mlx5::kInlineFlag)};
      for (unsigned i = 0; i < 7; ++i)
        words[i + 1] = static_cast<std::uint32_t>(payload >> (i % 2 * 32)) * (i + 1);
      for (unsigned i = 0; i < 2; ++i) {
        if (i == 1 && bytes <= 12) break;
        add(w, {{words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]}});
      }
      block_sync();
      for (std::uint32_t i = thread_index(); i < bytes; i += block_size())
        there()[to + i] = static_cast<std::uint8_t>(words[1 + i / 4] >> (8 * (i % 4)));
      block_sync();
    } else if (kind <= 7) {  // WRITE: words for the lanes of a warp, or any bytes
      w.opcode = mlx5::kWrite;
      if (kind <= 5) {
        const std::uint32_t bytes = below(4) == 0 ? 4 : 8, to = below(kBytes / 8) * 8,
                            from = below(kBytes / 8) * 8;
        add(w, remote(to));
        add(w, local(from, bytes));
        move(there() + to, here() + from, bytes);
      } else {
        const std::uint32_t bytes = 1 + below(400), to = below(kBytes - bytes);
        add(w, remote(to));
        buffers(w, bytes, [&](std::uint32_t at, std::uint32_t offset, std::uint32_t n) {
          move(there() + to + offset, here() + at, n);
        });
      }
    } else if (kind == 8) {
      w.opcode = mlx5::kRead;
      const std::uint32_t bytes = 1 + below(400), from = below(kBytes - bytes);
      add(w, remote(from));
      buffers(w, bytes, [&](std::uint32_t at, std::uint32_t offset, std::uint32_t n) {
        move(here() + at, there() + from + offset, n);
      });
    } else {
      atomic(w);
    }
    return w;
  }

  MARROW_DEVICE void atomic(Wqe& w) {
    const bool swap = below(2) == 0, masked = below(3) == 0,
               four = masked && (swap || below(2) == 0);
    const std::uint32_t size = four ? 4 : 8, at = below(kBytes / size) * size,
                        sink = below(kBytes - size);
    const std::uint64_t operand = next(), mask = next() & next(),
                        compare_mask = below(2) == 0 ? 0xf : 0;
    block_sync();
    const std::uint64_t old =
        four ? load<std::uint32_t>(there() + at) : load<std::uint64_t>(there() + at);
    const std::uint64_t compare = below(2) == 0 ? old : old ^ 1;
    const auto low = [](std::uint64_t v) { return mlx5::to_big32(static_cast<std::uint32_t>(v)); };
    w.opcode = masked ? (swap ? mlx5::kMaskedCompareSwap : mlx5::kMaskedFetchAdd)
                      : (swap ? mlx5::kCompareSwap : mlx5::kFetchAdd);
    add(w, remote(at));
    std::uint64_t fresh;
    if (!masked) {
      add(w, of64(operand, compare));
      fresh = swap ? (old == compare ? operand : old) : old + operand;
    } else {
      w.opmod = four ? mlx5::kMasked4 : mlx5::kMasked8;
      if (swap) {  // 4 bytes: the other form takes two blocks
        add(w, {{low(operand), low(compare), low(mask), low(compare_mask)}});
        fresh = ((old ^ compare) & compare_mask & 0xffffffff) != 0
                    ? old
                    : (old & ~mask) | (operand & mask);
      } else {
        add(w, four ? Segment{{low(operand), low(mask), 0, 0}} : of64(operand, mask));
        // Bit by bit: a boundary bit swallows its carry.
        fresh = 0;
        std::uint64_t carry = 0;
        for (unsigned i = 0; i < size * 8; ++i) {
          const std::uint64_t bits = (old >> i & 1) + (operand >> i & 1) + carry;
          fresh |= (bits & 1) << i;
          carry = (mask >> i & 1) != 0 ? 0 : bits >> 1;
        }
      }
    }
    add(w, local(sink, size));
    block_sync();  // all have read the old value
    if (thread_index() == 0) {
      if (four) {
        store(there() + at, static_cast<std::uint32_t>(fresh));
        store(here() + sink, static_cast<std::uint32_t>(old));
      } else {
        store(there() + at, fresh);
        store(here() + sink, old);
      }
    }
    block_sync();
  }

  MARROW_DEVICE Wqe mistake() {
    Wqe w;
    w.opcode = mlx5::kWrite;
    w.syndrome = mlx5::kRemoteAccessError;
    // The window is the region: outside of it, not of the queue's area.
    const std::uint64_t end = window_.bytes - area_ - kSide - kGuard;
    const std::uint64_t local_end = window_.bytes - area_ - kGuard;
    switch (below(7)) {
      case 0: return add(w, remote(0, 1u << 24)), add(w, local(0, 8)), w;
      case 1: return add(w, remote(end - 7)), add(w, local(0, 8)), w;
      case 2: w.opcode = mlx5::kRead; return add(w, remote(end)), add(w, local(0, 8)), w;
      case 3:
        w.syndrome = mlx5::kLocalProtectionError;
        return add(w, remote(0)), add(w, local(0, 8, 1u << 24)), w;
      case 4:
        w.opcode = mlx5::kRead;
        w.syndrome = mlx5::kLocalProtectionError;
        return add(w, remote(0)), add(w, local(local_end - 7, 8)), w;
      case 5:
        w.opcode = mlx5::kFetchAdd;
        w.syndrome = mlx5::kRemoteInvalidRequestError;
        return add(w, remote(4)), add(w, of64(1, 0)), add(w, local(0, 8)), w;
      default:
        w.opcode = 0x3e;
        w.syndrome = mlx5::kLocalQpOperationError;
        return w;
    }
  }

  MARROW_DEVICE void ring(std::uint32_t how) {
    if (thread_index() != 0) return;
    const auto index = static_cast<std::uint16_t>(producer_);
    const std::uint32_t word = mlx5::record_word(index);
    const std::uint64_t bell = std::uint64_t{queue_->qpn} << 32 | word >> 8;
    if (how == 1) {
      publish<Scope::system>(Store{queue_->record, word});
    } else if (how == 2) {
      publish<Scope::system>(Store{queue_->doorbell, bell});
    } else {
      publish<Scope::system>(Store{queue_->record, word}, Store{queue_->doorbell, bell});
    }
  }

  /// Posts a batch and what it expects. @return whether it ends in a mistake
  MARROW_DEVICE bool batch(std::uint32_t good, bool must_fail) {
    const std::uint32_t most = depth_ / 2 < kMostBatch ? depth_ / 2 : kMostBatch;
    const std::uint32_t wanted = 1 + below(most);
    expected_ = 0;
    bool failed = false;
    for (std::uint32_t i = 0; i < wanted; ++i) {
      const bool last = i + 1 == wanted;
      Wqe w;
      const bool wrong = !failed && (below(good) == 0 || (last && must_fail));
      if (wrong) {
        w = mistake();
      } else if (failed) {  // flushed: changes nothing
        add(w, remote(0));
        add(w, local(0, 8));
        w.opcode = mlx5::kWrite;
        w.syndrome = mlx5::kFlushError;
      } else if (!last) {
        w = make();
      }
      failed = failed || wrong;
      const bool completes = last || failed || below(3) != 0;
      const std::uint32_t flags =
          below(4) << 5 | (completes ? mlx5::kCompletionAlways : mlx5::kCompletionOnError);
      if (thread_index() == 0) {
        w.segment[0] = {
            {mlx5::control_word(w.opcode, static_cast<std::uint16_t>(producer_), w.opmod),
             queue_->qpn | w.ds << 24, flags << 24, 0}};
        auto* block = queue_->sq + (producer_ & (depth_ - 1)) * std::size_t{mlx5::kBlockBytes};
        for (unsigned s = 0; s < 4; ++s) {
          const Segment& from = w.segment[s];
          store_wide(block + s * 16,
                     Words16{{from.word[0], from.word[1], from.word[2], from.word[3]}});
        }
        if (completes) {
          shared_.expected[expected_] = {static_cast<std::uint16_t>(producer_), w.syndrome};
        }
      }
      expected_ += completes ? 1 : 0;
      ++producer_;
      ++posted_;
      if (!last && below(8) == 0) ring(0);
    }
    ring(below(3));
    block_sync();
    return failed;
  }

  /// Waits for everything that the batch expects. @return whether all was right
  MARROW_DEVICE bool poll_all() {
    if (thread_index() == 0) {
      for (std::uint32_t i = 0; i < expected_ && shared_.wrong == 0; ++i, ++completions_) {
        const std::uint32_t* entry = queue_->cq + (completions_ & (depth_ - 1)) * 16;
        const std::uint64_t start = now_ns();
        std::uint32_t word = 0;
        for (std::uint32_t spins = 0;; ++spins) {
          word = observe<Scope::system>(entry);
          if (mlx5::cqe_valid(word, completions_, depth_)) break;
          relax(spins);
          if ((spins & 255) == 255 && now_ns() - start > 5'000'000'000ull) {
            wrong(__LINE__, posted_, word, shared_.expected[i].index);
            break;
          }
        }
        if (shared_.wrong != 0) break;
        const Expected& wanted = shared_.expected[i];
        const std::uint32_t syndrome =
            mlx5::cqe_opcode(word) == mlx5::kRequester
                ? std::uint32_t{mlx5::kNoError}
                : mlx5::from_big32(load_relaxed<Scope::system>(entry - 2)) & 0xff;
        if (mlx5::cqe_counter(word) != wanted.index)
          wrong(__LINE__, posted_, mlx5::cqe_counter(word), wanted.index);
        if (syndrome != wanted.syndrome) wrong(__LINE__, wanted.index, syndrome, wanted.syndrome);
      }
    }
    block_sync();
    return shared_.wrong == 0;
  }

  /// Both sides and their guards, as the model has them.
  MARROW_DEVICE bool equal() {
    settle<Scope::system>();
    const auto* real = reinterpret_cast<const std::uint64_t*>(memory_);
    const std::uint8_t* model = shared_.local;  // the remote side lies behind it
    for (std::uint32_t i = thread_index(); i < kArea / 8; i += block_size()) {
      const std::uint64_t got = load_relaxed<Scope::system>(real + i);
      const std::uint64_t wanted = load<std::uint64_t>(model + i * 8);
      if (got != wanted) wrong(__LINE__, i * 8, got, wanted);
    }
    block_sync();
    return shared_.wrong == 0;
  }

  MARROW_DEVICE void wrong(int line, std::uint64_t at, std::uint64_t got, std::uint64_t wanted) {
    shared_.wrong = 1;
    verdict_->at = at;
    verdict_->got = got;
    verdict_->wanted = wanted;
    verdict_->line = static_cast<std::uint64_t>(line);
  }

  const DeviceCommunicator& comm_;
  const WindowHandle& window_;
  Shared& shared_;
  Verdict* verdict_;
  GdaQueue* queue_;
  std::uint8_t* memory_;
  std::uint64_t random_, area_, posted_ = 0, completions_ = 0, producer_ = 0;
  std::uint32_t depth_, expected_ = 0;
};
static_assert(offsetof(Shared, remote) == kSide && kSide % 8 == 0);

MARROW_KERNEL post_and_compare(const MARROW_GRID_CONSTANT DeviceCommunicator comm,
                               const MARROW_GRID_CONSTANT WindowHandle window, std::uint64_t seed,
                               std::uint64_t wqes, std::uint32_t good, Verdict* verdicts) {
  Poster(comm, window, seed, verdicts + block_index()).run(wqes, good);
}

}  // namespace marrow::softnic_posted
