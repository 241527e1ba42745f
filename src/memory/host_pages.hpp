// SPDX-License-Identifier: Apache-2.0
// Which host pages this process has registered with CUDA, and how often they are wanted. CUDA refuses
// to register a page twice and forgets a range as a whole, so buffers that overlap (two tensors of one
// allocation, one buffer of two thread ranks) share registrations: a piece is registered once, for the
// first that needs it, and given back after the last. It makes no CUDA call itself, so it is tested
// without a GPU.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>

namespace marrow::memory {

class HostPages {
 public:
  /// Registers bytes [first, end), whole pages. @return false: somebody else's registration is in the way
  using Register = std::function<bool(std::uintptr_t first, std::uintptr_t end)>;
  using Unregister = std::function<void(std::uintptr_t first)>;
  /// @return whether all of [first, end) is registered, by whomever
  using Registered = std::function<bool(std::uintptr_t first, std::uintptr_t end)>;

  enum class Outcome {
    held,     ///< all of the range is registered, until drop()
    foreign,  ///< the program has registered all of it: nothing was done
    mixed     ///< the program has registered a part of it: nothing was done
  };

  /// [first, end): whole pages. What `enroll` throws goes on, and nothing stays registered for it.
  Outcome hold(std::uintptr_t first, std::uintptr_t end, const Register& enroll,
               const Unregister& withdraw, const Registered& is_registered);
  /// Ends one hold() of the same range.
  void drop(std::uintptr_t first, std::uintptr_t end, const Unregister& withdraw);

  /// Registrations that are open.
  std::size_t pieces() const;

 private:
  struct Piece {
    std::uintptr_t end;
    std::uint64_t holders;
  };
  using Pieces = std::map<std::uintptr_t, Piece>;
  /// The first piece that ends after `address`.
  Pieces::iterator first_past(std::uintptr_t address);
  void drop_locked(std::uintptr_t first, std::uintptr_t end, const Unregister& withdraw);

  mutable std::mutex mutex_;
  Pieces pieces_;
};

}  // namespace marrow::memory
