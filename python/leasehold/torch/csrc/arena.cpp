// The memory of a private pool.
#include "arena.hpp"

#include <algorithm>

namespace leasehold_torch {
namespace {

constexpr size_t MIB = size_t(1) << 20;
constexpr size_t UNIT = 512;         // the size of a piece is a multiple of it
constexpr size_t SMALL = MIB;        // the largest small block
constexpr size_t GRANULE = 2 * MIB;  // the size of a segment is a multiple of it
constexpr size_t COMMON = 20 * MIB;  // a segment of middle-sized blocks
constexpr size_t MIDDLE = 10 * MIB;  // the least size with a segment of its own

size_t up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

size_t segment_bytes(size_t bytes) {
    if (bytes <= SMALL) {
        return GRANULE;
    }
    return bytes < MIDDLE ? COMMON : up(bytes, GRANULE);
}

} // namespace

uintptr_t Arena::take(size_t requested, uintptr_t stream, bool grow, bool split) {
    if (requested > SIZE_MAX / 2) {
        return 0;
    }
    size_t bytes = std::max(up(requested, UNIT), UNIT);
    bool small = bytes <= SMALL;
    auto fit = free_.lower_bound(Key{stream, small, bytes, 0});
    bool found = fit != free_.end() && std::get<0>(*fit) == stream && std::get<1>(*fit) == small;
    Pieces::iterator at;
    if (found) {
        at = pieces_.find(std::get<3>(*fit));
        free_.erase(fit);
    } else {
        if (!grow) {
            return 0;
        }
        Piece piece;
        piece.bytes = segment_bytes(bytes);
        void *segment = source_.take(piece.bytes, stream);
        if (segment == nullptr && piece.bytes > up(bytes, GRANULE)) {
            piece.bytes = up(bytes, GRANULE);
            segment = source_.take(piece.bytes, stream);
        }
        if (segment == nullptr) {
            return 0;
        }
        piece.segment = reinterpret_cast<uintptr_t>(segment);
        piece.stream = stream;
        piece.small = small;
        reserved_ += piece.bytes;
        segments_.emplace(piece.segment, piece);
        at = pieces_.emplace(piece.segment, piece).first;
    }
    size_t rest = at->second.bytes - bytes;
    if (split && rest >= (small ? UNIT : SMALL)) {
        Piece right = at->second;
        right.bytes = rest;
        at->second.bytes = bytes;
        free_.insert(key(pieces_.emplace(at->first + bytes, right).first));
    }
    at->second.state = Piece::Live;
    at->second.requested = requested;
    return at->first;
}

void Arena::make_free(Pieces::iterator at) {
    at->second.state = Piece::Free;
    at->second.requested = 0;
    auto joins = [&](Pieces::iterator other) {
        return other->second.state == Piece::Free && other->second.segment == at->second.segment;
    };
    auto right = std::next(at);
    if (right != pieces_.end() && joins(right)) {
        free_.erase(key(right));
        at->second.bytes += right->second.bytes;
        pieces_.erase(right);
    }
    if (at != pieces_.begin() && joins(std::prev(at))) {
        auto left = std::prev(at);
        free_.erase(key(left));
        left->second.bytes += at->second.bytes;
        pieces_.erase(at);
        at = left;
    }
    free_.insert(key(at));
}

void Arena::give(uintptr_t address, bool deferred) {
    auto at = pieces_.find(address);
    if (at == pieces_.end() || at->second.state != Piece::Live) {
        return;
    }
    if (deferred) {
        at->second.state = Piece::Deferred;
        at->second.requested = 0;
        ++deferred_;
    } else {
        make_free(at);
    }
}

bool Arena::undefer() {
    std::vector<uintptr_t> deferred;
    for (const auto &[address, piece] : pieces_) {
        if (piece.state == Piece::Deferred) {
            deferred.push_back(address);
        }
    }
    for (uintptr_t address : deferred) {
        make_free(pieces_.find(address));
    }
    deferred_ = 0;
    return !deferred.empty();
}

bool Arena::release() {
    undefer();
    for (auto segment = segments_.begin(); segment != segments_.end();) {
        auto at = pieces_.find(segment->first);
        if (at->second.state != Piece::Free || at->second.bytes != segment->second.bytes) {
            ++segment;
            continue;
        }
        free_.erase(key(at));
        pieces_.erase(at);
        reserved_ -= segment->second.bytes;
        source_.give(reinterpret_cast<void *>(segment->first), segment->second.bytes);
        segment = segments_.erase(segment);
    }
    return segments_.empty();
}

void Arena::restore(const Pieces &then) {
    pieces_.clear();
    free_.clear();
    deferred_ = 0;
    for (const auto &[address, piece] : then) {
        if (segments_.count(piece.segment) != 0) {
            pieces_.emplace(address, piece);
        }
    }
    for (const auto &[address, segment] : segments_) {
        pieces_.emplace(address, segment);
    }
    for (auto at = pieces_.begin(); at != pieces_.end(); ++at) {
        if (at->second.state == Piece::Free) {
            free_.insert(key(at));
        }
        deferred_ += at->second.state == Piece::Deferred;
    }
}

} // namespace leasehold_torch
