// A hash table of blocks by address: open addressing, no allocation for each block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace leasehold_torch {

struct Pool;

/// A block that PyTorch holds.
struct Block {
    uintptr_t address = 0; // 0: an empty place
    size_t bytes = 0;      // as asked for
    uintptr_t stream = 0;  // of its allocation
    Pool *pool = nullptr;  // nullptr: the main memory
};

/// The blocks of a device. The caller has a lock.
class Table {
  public:
    Table() : places_(1024) {}

    size_t size() const { return used_; }

    void insert(const Block &block) {
        if ((used_ + 1) * 2 > places_.size()) {
            grow();
        }
        put(block);
        ++used_;
    }

    Block *find(uintptr_t address) {
        for (size_t at = home(address);; at = next(at)) {
            if (places_[at].address == address) {
                return &places_[at];
            }
            if (places_[at].address == 0) {
                return nullptr;
            }
        }
    }

    /// Takes a block out. The address of the result is 0 if it is unknown.
    Block remove(uintptr_t address) {
        Block *found = find(address);
        if (found == nullptr) {
            return {};
        }
        Block taken = *found;
        // The blocks after it move up, so that each is still found from its home.
        size_t hole = static_cast<size_t>(found - places_.data());
        for (size_t at = next(hole); places_[at].address != 0; at = next(at)) {
            size_t wanted = home(places_[at].address);
            if (((at - wanted) & mask()) >= ((at - hole) & mask())) {
                places_[hole] = places_[at];
                hole = at;
            }
        }
        places_[hole] = {};
        --used_;
        return taken;
    }

    template <typename F> void each(F f) {
        for (Block &block : places_) {
            if (block.address != 0) {
                f(block);
            }
        }
    }

  private:
    size_t mask() const { return places_.size() - 1; }
    size_t next(size_t at) const { return (at + 1) & mask(); }
    size_t home(uintptr_t address) const {
        // Addresses are multiples of 256; the product's upper bits mix all others.
        return ((address >> 8) * 0x9e3779b97f4a7c15ull >> 32) & mask();
    }
    void put(const Block &block) {
        size_t at = home(block.address);
        while (places_[at].address != 0) {
            at = next(at);
        }
        places_[at] = block;
    }
    void grow() {
        std::vector<Block> old(places_.size() * 2);
        old.swap(places_);
        for (const Block &block : old) {
            if (block.address != 0) {
                put(block);
            }
        }
    }

    std::vector<Block> places_;
    size_t used_ = 0;
};

} // namespace leasehold_torch
