// The memory of a private pool: segments that are split into blocks, with states that can be
// saved and restored.
//
// A captured graph uses its addresses at each launch, and PyTorch's trees of graphs set a pool
// back to an earlier state, with blocks at given addresses. So a private pool has blocks of its
// own over large segments, instead of asking Leasehold for each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

namespace leasehold_torch {

/// Gives and takes back segments.
struct Source {
    /// Returns nullptr if there is no memory.
    std::function<void *(size_t bytes, uintptr_t stream)> take;
    std::function<void(void *segment, size_t bytes)> give;
};

/// A part of a segment.
struct Piece {
    enum State { Free, Live, Deferred };
    size_t bytes = 0;
    size_t requested = 0; // 0 unless live
    uintptr_t segment = 0;
    uintptr_t stream = 0;
    State state = Free;
    bool small = false;
};

/// The pieces at one moment, by address.
using Pieces = std::map<uintptr_t, Piece>;

/// The memory of a private pool. The caller has a lock.
class Arena {
  public:
    explicit Arena(Source source) : source_(std::move(source)) {}
    Arena(const Arena &) = delete;
    Arena &operator=(const Arena &) = delete;

    /// Allocates a block. Without `grow` it takes no new segment. Returns 0 if there is no memory.
    uintptr_t take(size_t bytes, uintptr_t stream, bool grow, bool split);

    /// Frees a block. With `deferred` its memory waits for `undefer`, since other streams use it.
    void give(uintptr_t address, bool deferred);

    /// Makes the deferred memory free. All work of the device is over. Returns whether it had any.
    bool undefer();

    /// Gives back the segments without a live block. All work of the device is over, and no graph
    /// uses them. Returns whether the arena is empty.
    bool release();

    const Pieces &pieces() const { return pieces_; }
    size_t reserved() const { return reserved_; }
    /// Blocks that wait for `undefer`.
    size_t deferred() const { return deferred_; }
    size_t segments() const { return segments_.size(); }

    /// Sets the pieces back to an earlier state. Segments that are newer become free.
    void restore(const Pieces &then);

  private:
    using Key = std::tuple<uintptr_t, bool, size_t, uintptr_t>; // stream, small, bytes, address

    static Key key(Pieces::const_iterator at) {
        return {at->second.stream, at->second.small, at->second.bytes, at->first};
    }
    void make_free(Pieces::iterator at);

    Source source_;
    Pieces pieces_;
    std::set<Key> free_;
    std::map<uintptr_t, Piece> segments_; // each as one free piece
    size_t reserved_ = 0;
    size_t deferred_ = 0;
};

} // namespace leasehold_torch
