// The memory of one device over leasehold.h.
#include "core.hpp"

#include <algorithm>

namespace leasehold_torch {
namespace {

constexpr size_t SMALL = size_t(1) << 20;
constexpr size_t GRANULE = size_t(2) << 20;

/// The parts of `ranges` that are not in `others`.
template <typename F>
void without(const Segments::Ranges &ranges, const Segments::Ranges &others, F visit) {
    for (const auto &[begin, range] : ranges) {
        uintptr_t at = begin, end = begin + range.first;
        auto other = others.upper_bound(at);
        if (other != others.begin()) {
            --other;
        }
        for (; at < end && other != others.end() && other->first < end; ++other) {
            if (other->first > at) {
                visit(at, other->first - at, range.second);
            }
            at = std::max(at, other->first + other->second.first);
        }
        if (at < end) {
            visit(at, end - at, range.second);
        }
    }
}

/// The ranges that are not in `others` as a whole.
template <typename F>
void missing(const Segments::Ranges &ranges, const Segments::Ranges &others, F visit) {
    for (const auto &[at, range] : ranges) {
        auto other = others.find(at);
        if (other == others.end() || other->second != range) {
            visit(at, range.first, range.second);
        }
    }
}

template <typename T> T sized() {
    T made = {};
    made.size = sizeof(T);
    return made;
}

} // namespace

void Places::add(uintptr_t at, size_t bytes, const Context &context) {
    remove(at, bytes);
    if (context) {
        ranges_[at] = {at + bytes, context};
    }
}

void Places::remove(uintptr_t at, size_t bytes) {
    uintptr_t end = at + bytes;
    auto range = ranges_.upper_bound(at);
    if (range != ranges_.begin()) {
        --range;
    }
    while (range != ranges_.end() && range->first < end) {
        auto [begin, rest] = *range;
        if (rest.first <= at) {
            ++range;
            continue;
        }
        range = ranges_.erase(range);
        if (begin < at) {
            ranges_[begin] = {at, rest.second};
        }
        if (rest.first > end) {
            ranges_[end] = rest;
        }
    }
}

Context Places::find(uintptr_t at) const {
    auto range = ranges_.upper_bound(at);
    if (range == ranges_.begin() || (--range)->second.first <= at) {
        return nullptr;
    }
    return range->second.second;
}

Memory::Memory(const Library &library, const std::string &name, uint64_t budget, uint32_t policy,
               bool shareable)
    : library_(library), budget_(budget) {
    auto options = sized<leasehold_device_options>();
    options.budget = budget;
    options.policy = policy;
    options.flags = shareable ? LEASEHOLD_DEVICE_SHAREABLE : 0;
    check(library_.device_open(name.c_str(), &options, &device_));
    base_ = sized<leasehold_stats>();
    clock = [] { return uint64_t(0); };
    notes = [] { return Notes{}; };
    current_stream = [] { return uintptr_t(0); };
    is_captured = [](uintptr_t) { return false; };
}

void Memory::check(int status) const {
    if (status != LEASEHOLD_OK) {
        throw Failure(status, library_.last_error());
    }
}

// ---- blocks

/// Counts a block in (`Count::add`) or out (`Count::sub`).
void Memory::count(const Block &block, void (Count::*change)(int64_t)) {
    for (size_t size : {size_t(0), block.bytes <= SMALL ? size_t(1) : size_t(2)}) {
        (counts_[size].*change)(1);
        (bytes_[size].*change)(static_cast<int64_t>(block.bytes));
    }
}

void Memory::insert(const Block &block) {
    blocks_.insert(block);
    count(block, &Count::add);
    if (block.pool != nullptr) {
        ++block.pool->live;
    }
}

/// The pool of an allocation, under the lock.
Pool *Memory::route(uintptr_t stream) {
    // The pool that began last: pools nest, also in the capture of a graph.
    for (auto entry = underway_.rbegin(); entry != underway_.rend(); ++entry) {
        if (entry->filter(stream)) {
            return pools_.at(entry->id).get();
        }
    }
    return nullptr;
}

uintptr_t Memory::take(Pool *pool, size_t bytes, uintptr_t stream, int &status) {
    void *block = nullptr;
    if (pool == nullptr) {
        status = library_.malloc(device_, bytes, stream, &block);
    } else if (pool->region != 0) {
        status = library_.pool_malloc(pool->region, bytes, stream, &block);
    } else {
        // Memory that other streams used comes back before the pool grows.
        uintptr_t found = pool->arena->take(bytes, stream, false, pool->split);
        if (found == 0) {
            if (pool->arena->deferred() != 0 && synchronize()) {
                pool->arena->undefer();
            }
            found = pool->arena->take(bytes, stream, true, pool->split);
        }
        status = found == 0 ? LEASEHOLD_OUT_OF_MEMORY : LEASEHOLD_OK;
        return found;
    }
    return status == LEASEHOLD_OK ? reinterpret_cast<uintptr_t>(block) : 0;
}

void *Memory::allocate(size_t bytes, uintptr_t stream) {
    if (bytes == 0) {
        return nullptr;
    }
    Context context = gather(true);
    Block block{0, bytes, stream, nullptr};
    int status = LEASEHOLD_OK;
    if (routes_.load(std::memory_order_acquire) == 0) {
        block.address = take(nullptr, bytes, stream, status);
        if (block.address != 0) {
            std::lock_guard<std::mutex> guard(lock_);
            insert(block);
        }
    } else {
        std::lock_guard<std::mutex> guard(lock_);
        block.pool = route(stream);
        block.address = take(block.pool, bytes, stream, status);
        if (block.address != 0) {
            insert(block);
        } else if (block.pool != nullptr) {
            ++block.pool->live; // so that it stays
        }
    }
    if (block.address == 0) {
        block.address = take_pressed(block, status);
    }
    if (has_history()) {
        note_segments(context);
        PoolId id = block.pool == nullptr ? PoolId{} : block.pool->id;
        emit({Event::Alloc, block.address, bytes, stream, id, clock(), std::move(context)});
    }
    return reinterpret_cast<void *>(block.address);
}

uintptr_t Memory::take_pressed(Block block, int status) {
    std::string text = library_.last_error();
    bool memory = status == LEASEHOLD_OUT_OF_MEMORY || status == LEASEHOLD_OVER_BUDGET;
    bool reclaimed = memory && reclaim();
    std::lock_guard<std::mutex> guard(lock_);
    if (reclaimed) {
        block.address = take(block.pool, block.bytes, block.stream, status);
        text = block.address == 0 ? library_.last_error() : "";
    }
    if (block.pool != nullptr) {
        --block.pool->live;
    }
    if (block.address == 0 && memory && block.pool == nullptr) {
        for (auto &[id, pool] : pools_) {
            if (block.address == 0 && pool->last_resort && pool->arena != nullptr) {
                block.address = pool->arena->take(block.bytes, block.stream, false, pool->split);
                block.pool = block.address == 0 ? nullptr : pool.get();
            }
        }
    }
    if (block.address == 0) {
        failures_ += memory;
        throw Failure(status, text);
    }
    insert(block);
    return block.address;
}

/// Gives back what needs all work of the device to be over, of one pool or of all. Returns whether
/// it did so.
bool Memory::reclaim(PoolId only) {
    if (!synchronize()) {
        return false;
    }
    std::lock_guard<std::mutex> guard(lock_);
    std::vector<PoolId> unused;
    for (auto &[id, pool] : pools_) {
        if (only != PoolId{} && only != id) {
            continue;
        }
        if (pool->arena != nullptr) {
            pool->arena->undefer();
        }
        if (pool->uses == 0) {
            unused.push_back(id);
        }
    }
    for (PoolId id : unused) {
        drop_if_unused(id);
    }
    return true;
}

/// Whether a capture is known that a wait for the device would break, under `begun_lock_`.
bool Memory::is_capturing() {
    return is_captured(current_stream()) ||
           std::any_of(begun_.begin(), begun_.end(), is_captured);
}

void Memory::refuse_in_capture() {
    std::lock_guard<std::mutex> guard(begun_lock_);
    if (is_capturing()) {
        throw Failure(LEASEHOLD_INVALID_STATE,
                      "this waits for the device, which would break the capture of a graph: do it "
                      "before or after the capture");
    }
}

bool Memory::synchronize() {
    // No other thread begins a pool, which a capture does first, until the wait is over.
    std::lock_guard<std::mutex> guard(begun_lock_);
    if (is_capturing()) {
        return false;
    }
    return library_.device_synchronize(device_) == LEASEHOLD_OK;
}

size_t Memory::free(void *address) {
    auto at = reinterpret_cast<uintptr_t>(address);
    Context context = gather(false);
    Block block;
    PoolId id;
    bool direct;
    {
        std::lock_guard<std::mutex> guard(lock_);
        block = blocks_.remove(at);
        if (block.address == 0) {
            return 0;
        }
        count(block, &Count::sub);
        direct = block.pool == nullptr || block.pool->region != 0;
        if (block.pool != nullptr) {
            id = block.pool->id;
            --block.pool->live;
        }
        if (!direct) {
            auto others = others_.find(at);
            block.pool->arena->give(at, others != others_.end());
            if (others != others_.end()) {
                others_.erase(others);
            }
        }
    }
    if (has_history()) {
        emit_end(block, id, context);
    }
    if (direct) {
        check(library_.free(device_, address));
    }
    return block.bytes;
}

void Memory::record_stream(void *address, uintptr_t stream, leasehold_device peer) {
    auto at = reinterpret_cast<uintptr_t>(address);
    {
        std::lock_guard<std::mutex> guard(lock_);
        Block *block = blocks_.find(at);
        if (block == nullptr) {
            throw Failure(LEASEHOLD_INVALID_ARGUMENT, "record_stream: the block is unknown");
        }
        if (block->pool != nullptr && block->pool->region == 0) {
            if (peer != 0 || stream != block->stream) {
                others_[at].push_back(stream);
            }
            return;
        }
    }
    check(peer == 0 ? library_.record_stream(device_, address, stream)
                    : library_.record_peer_stream(device_, address, peer, stream));
}

Block Memory::find(void *address) {
    std::lock_guard<std::mutex> guard(lock_);
    Block *block = blocks_.find(reinterpret_cast<uintptr_t>(address));
    return block == nullptr ? Block{} : *block;
}

// ---- the memory as a whole

void Memory::empty_cache(PoolId id) {
    bool all = id == PoolId{};
    leasehold_pool graphs;
    {
        std::lock_guard<std::mutex> guard(lock_);
        graphs = graphs_;
        if (!all && pools_.count(id) == 0) {
            return;
        }
    }
    Context context = gather(false);
    if (reclaim(id)) {
        // Segments that pools gave back just now carry new marks of their streams.
        synchronize();
    }
    uint64_t freed = 0;
    if (all) {
        check(library_.trim(device_, 0, &freed));
    } else if (graphs != 0) {
        check(library_.pool_trim(graphs, 0, &freed));
    }
    {
        std::lock_guard<std::mutex> guard(lock_);
        trims_ += freed != 0;
    }
    note_segments(context);
}

void Memory::set_budget(uint64_t bytes) {
    std::lock_guard<std::mutex> guard(lock_);
    budget_ = bytes;
    bound();
}

uint64_t Memory::budget() {
    std::lock_guard<std::mutex> guard(lock_);
    return budget_;
}

/// Tells the library what the pools' own sources leave of the budget, under the lock.
void Memory::bound() {
    uint64_t left = budget_ > foreign_ ? budget_ - foreign_ : 1;
    check(library_.set_budget(device_, budget_ == 0 ? 0 : left));
}

/// Counts a segment of a pool's own source, if the budget has room for it. Under the lock.
bool Memory::make_room(size_t bytes) {
    foreign_ += bytes;
    bound();
    for (bool trimmed = false;; trimmed = true) {
        if (budget_ == 0 || raw_statistics().reserved_bytes + foreign_ <= budget_) {
            return true;
        }
        if (trimmed) {
            foreign_ -= bytes;
            bound();
            return false;
        }
        check(library_.trim(device_, 0, nullptr));
    }
}

leasehold_stats Memory::raw_statistics() {
    auto found = sized<leasehold_stats>();
    check(library_.stats_get(device_, &found));
    return found;
}

Statistics Memory::statistics() {
    leasehold_stats now = raw_statistics();
    std::lock_guard<std::mutex> guard(lock_);
    int64_t reserved = static_cast<int64_t>(now.reserved_bytes + foreign_);
    int64_t peak = static_cast<int64_t>(now.reserved_bytes_peak + foreign_);
    auto granules = [](int64_t bytes) { return (bytes + int64_t(GRANULE) - 1) / int64_t(GRANULE); };
    reserved_.follow(reserved, peak);
    segments_.follow(granules(reserved), granules(peak));
    int64_t unused = std::max<int64_t>(reserved - bytes_[0].current, 0);
    unused_.follow(unused, std::max(unused_.peak, unused));
    Statistics found;
    found.blocks = counts_;
    found.bytes = bytes_;
    found.reserved = reserved_;
    found.segments = segments_;
    found.unused = unused_;
    found.retries = static_cast<int64_t>(now.retries - base_.retries);
    found.failures = failures_;
    found.host_waits = static_cast<int64_t>(now.host_waits - base_.host_waits);
    found.growths = static_cast<int64_t>(now.growths - base_.growths);
    found.trims = trims_;
    return found;
}

void Memory::reset_peaks() {
    check(library_.stats_reset_peaks(device_));
    std::lock_guard<std::mutex> guard(lock_);
    for (Counts *counts : {&counts_, &bytes_}) {
        for (Count &count : *counts) {
            count.peak = count.current;
        }
    }
    unused_.peak = unused_.current;
}

void Memory::reset_accumulated() {
    leasehold_stats now = raw_statistics();
    std::lock_guard<std::mutex> guard(lock_);
    base_ = now;
    for (Counts *counts : {&counts_, &bytes_}) {
        for (Count &count : *counts) {
            count.allocated = count.freed = 0;
        }
    }
    for (Count *count : {&reserved_, &segments_, &unused_}) {
        count->allocated = count->freed = 0;
    }
    failures_ = trims_ = 0;
}

uint64_t Memory::largest_free() {
    uint64_t bytes = 0;
    check(library_.largest_free(device_, &bytes));
    return bytes;
}

std::pair<uint64_t, uint64_t> Memory::free_and_total() {
    auto info = sized<leasehold_device_info>();
    check(library_.device_describe(device_, &info));
    return {info.free_bytes, info.total_bytes};
}

std::vector<Seen> Memory::walk() {
    struct Walk {
        std::vector<Seen> seen;
        std::map<leasehold_pool, PoolId> regions;
        leasehold_pool graphs;
    } walk;
    std::vector<Seen> own;
    {
        std::lock_guard<std::mutex> guard(lock_);
        walk.graphs = graphs_;
        for (auto &[id, pool] : pools_) {
            if (pool->region != 0) {
                walk.regions[pool->region] = id;
                continue;
            }
            std::map<uintptr_t, size_t> sizes;
            for (const auto &[at, piece] : pool->arena->pieces()) {
                sizes[piece.segment] += piece.bytes;
            }
            for (const auto &[at, piece] : pool->arena->pieces()) {
                own.push_back({id, piece.segment, sizes[piece.segment], at, piece.bytes,
                               piece.requested, piece.stream, piece.state == Piece::Live,
                               piece.state == Piece::Deferred, false, nullptr, nullptr});
            }
        }
    }
    auto visit = [](void *context, const leasehold_block *block) {
        auto &walk = *static_cast<Walk *>(context);
        bool graphs = block->pool == walk.graphs && walk.graphs != 0;
        if (graphs && block->state == LEASEHOLD_BLOCK_LIVE) {
            return; // an arena's segment: its pieces are known here
        }
        auto region = walk.regions.find(block->pool);
        PoolId id = region == walk.regions.end() ? PoolId{} : region->second;
        // Between segments of arenas, a free block is a segment of its own.
        uintptr_t segment = graphs ? block->address : block->segment_address;
        size_t segment_bytes = graphs ? block->bytes : block->segment_bytes;
        walk.seen.push_back({id, segment, segment_bytes, block->address, block->bytes,
                             block->requested_bytes, block->stream,
                             block->state == LEASEHOLD_BLOCK_LIVE,
                             block->state == LEASEHOLD_BLOCK_PENDING, block->expandable != 0,
                             nullptr, nullptr});
    };
    check(library_.visit_blocks(device_, visit, &walk));
    walk.seen.insert(walk.seen.end(), own.begin(), own.end());
    std::lock_guard<std::mutex> guard(history_lock_);
    for (Seen &seen : walk.seen) {
        auto context = contexts_.find(seen.address);
        if (seen.live && context != contexts_.end()) {
            seen.context = context->second;
        }
        seen.segment_context = places_.find(seen.segment);
    }
    return std::move(walk.seen);
}

// ---- private pools

/// The source of an arena: blocks of the one pool for graphs.
Source Memory::own_source() {
    Source source;
    source.take = [this](size_t bytes, uintptr_t stream) {
        void *block = nullptr;
        int status = library_.pool_malloc(graphs_, bytes, stream, &block);
        return status == LEASEHOLD_OK ? block : nullptr;
    };
    source.give = [this](void *segment, size_t) { library_.free(device_, segment); };
    return source;
}

/// A source whose segments the history notices.
Source Memory::counted(Source source) {
    Source made;
    made.take = [this, take = std::move(source.take)](size_t bytes, uintptr_t stream) {
        void *segment = take(bytes, stream);
        arena_changes_ += segment != nullptr;
        return segment;
    };
    made.give = [this, give = std::move(source.give)](void *segment, size_t bytes) {
        give(segment, bytes);
        ++arena_changes_;
    };
    return made;
}

/// A source of the caller's whose segments count to the budget.
Source Memory::bounded(Source source) {
    Source made;
    made.take = [this, take = std::move(source.take)](size_t bytes, uintptr_t stream) -> void * {
        if (!make_room(bytes)) {
            return nullptr;
        }
        void *segment = nullptr;
        try {
            segment = take(bytes, stream);
        } catch (...) {
            foreign_ -= bytes;
            bound();
            throw;
        }
        if (segment == nullptr) {
            foreign_ -= bytes;
            bound();
        }
        return segment;
    };
    made.give = [this, give = std::move(source.give)](void *segment, size_t bytes) {
        give(segment, bytes);
        foreign_ -= bytes;
        bound();
    };
    return made;
}

void Memory::use_pool(PoolId id, Source source, leasehold_pool region) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = pools_.find(id);
    if (found != pools_.end()) {
        ++found->second->uses;
        return;
    }
    auto pool = std::make_unique<Pool>();
    pool->id = id;
    pool->uses = 1;
    if (region != 0) {
        pool->region = region;
    } else if (source.take) {
        pool->arena = std::make_unique<Arena>(counted(bounded(std::move(source))));
    } else {
        if (graphs_ == 0) {
            auto options = sized<leasehold_pool_options>();
            options.name = "graphs";
            // Graphs use segments that an arena holds, never memory under free blocks.
            options.flags = LEASEHOLD_POOL_MOVABLE;
            check(library_.pool_create(device_, &options, &graphs_));
        }
        pool->arena = std::make_unique<Arena>(counted(own_source()));
    }
    pools_.emplace(id, std::move(pool));
}

Pool &Memory::pool_of(PoolId id) {
    auto found = pools_.find(id);
    if (found == pools_.end()) {
        throw Failure(LEASEHOLD_INVALID_ARGUMENT, "no memory pool " + std::to_string(id.first) +
                                                      "." + std::to_string(id.second));
    }
    return *found->second;
}

void Memory::set_last_resort(PoolId id, bool on) {
    std::lock_guard<std::mutex> guard(lock_);
    pool_of(id).last_resort = on;
}

void Memory::set_no_split(PoolId id) {
    std::lock_guard<std::mutex> guard(lock_);
    pool_of(id).split = false;
}

void Memory::begin_pool(PoolId id, std::function<bool(uintptr_t)> filter) {
    use_pool(id);
    uintptr_t stream = current_stream();
    {
        std::lock_guard<std::mutex> begun(begun_lock_);
        begun_.push_back(stream);
    }
    std::unique_lock<std::mutex> guard(lock_);
    for (const Route &route : underway_) {
        if (route.id == id) {
            guard.unlock();
            end_begun(stream);
            release_pool(id);
            throw Failure(LEASEHOLD_INVALID_STATE, "the memory pool takes allocations already");
        }
    }
    underway_.push_back({id, std::move(filter), stream});
    routes_.fetch_add(1, std::memory_order_release);
}

void Memory::end_begun(uintptr_t stream) {
    std::lock_guard<std::mutex> guard(begun_lock_);
    begun_.erase(std::find(begun_.begin(), begun_.end(), stream));
}

void Memory::end_pool(PoolId id) {
    std::unique_lock<std::mutex> guard(lock_);
    auto is = [&](const Route &route) { return route.id == id; };
    auto found = std::find_if(underway_.begin(), underway_.end(), is);
    if (found == underway_.end()) {
        throw Failure(LEASEHOLD_INVALID_STATE, "the memory pool takes no allocations");
    }
    uintptr_t stream = found->stream;
    underway_.erase(found);
    routes_.fetch_sub(1, std::memory_order_release);
    guard.unlock();
    end_begun(stream);
}

void Memory::release_pool(PoolId id) {
    std::lock_guard<std::mutex> guard(lock_);
    Pool &pool = pool_of(id);
    if (pool.uses > 0) {
        --pool.uses;
    }
    // A launch of a graph may still use its memory, so it goes once all work is known to be over.
    if (pool.uses == 0 && (pool.region != 0 || pool.arena->segments() == 0)) {
        drop_if_unused(id);
    }
}

/// Drops a pool without uses and blocks, under the lock. All work of the device is over.
bool Memory::drop_if_unused(PoolId id) {
    Pool &pool = *pools_.at(id);
    for (const Route &route : underway_) {
        if (route.id == id) {
            return false;
        }
    }
    bool empty = pool.arena == nullptr || pool.arena->release();
    if (pool.uses != 0 || pool.live != 0 || !empty) {
        return false;
    }
    pools_.erase(id);
    return true;
}

int Memory::pool_uses(PoolId id) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = pools_.find(id);
    return found == pools_.end() ? 0 : found->second->uses;
}

std::vector<uintptr_t> Memory::live_blocks(PoolId id) {
    std::lock_guard<std::mutex> guard(lock_);
    Pool *pool = &pool_of(id);
    std::vector<uintptr_t> found;
    blocks_.each([&](Block &block) {
        if (block.pool == pool) {
            found.push_back(block.address);
        }
    });
    return found;
}

Checkpoint Memory::checkpoint(PoolId id) {
    std::lock_guard<std::mutex> guard(lock_);
    Pool &pool = pool_of(id);
    if (pool.arena == nullptr) {
        throw Failure(LEASEHOLD_UNSUPPORTED,
                      "a region cannot be set back to an earlier state, which torch.compile with "
                      "mode=\"reduce-overhead\" does with its pool: give it a pool of its own");
    }
    return {id, pool.arena->pieces()};
}

Restored Memory::restore(const Checkpoint &checkpoint) {
    Context end = gather(false), begin = gather(true);
    std::vector<Block> ended, begun;
    std::unique_lock<std::mutex> guard(lock_);
    Pool *pool = &pool_of(checkpoint.id);
    if (pool->arena == nullptr) {
        throw Failure(LEASEHOLD_UNSUPPORTED, "a region cannot be set back to an earlier state");
    }
    for (const auto &[at, piece] : checkpoint.pieces) {
        if (piece.state == Piece::Live && pool->arena->pieces().count(piece.segment) == 0) {
            throw Failure(LEASEHOLD_INVALID_STATE,
                          "memory of the earlier state went back to the driver");
        }
    }
    Restored restored;
    blocks_.each([&](Block &block) {
        if (block.pool == pool) {
            restored.freed.push_back(block.address);
        }
    });
    for (uintptr_t at : restored.freed) {
        ended.push_back(blocks_.remove(at));
        count(ended.back(), &Count::sub);
        others_.erase(at);
        --pool->live;
    }
    pool->arena->restore(checkpoint.pieces);
    for (const auto &[at, piece] : checkpoint.pieces) {
        if (piece.state == Piece::Live) {
            begun.push_back({at, piece.requested, piece.stream, pool});
            insert(begun.back());
            restored.allocated.push_back(at);
        }
    }
    guard.unlock();
    if (has_history()) {
        for (const Block &block : ended) {
            emit_end(block, checkpoint.id, end);
        }
        for (const Block &block : begun) {
            emit({Event::Alloc, block.address, block.bytes, block.stream, checkpoint.id, clock(),
                  begin});
        }
    }
    return restored;
}

// ---- other processes

int Memory::export_block(void *block, std::string &description) {
    int descriptor = -1;
    description.assign(LEASEHOLD_SHARED_BYTES, '\0');
    auto *bytes = reinterpret_cast<uint8_t *>(&description[0]);
    check(library_.block_export(device_, block, &descriptor, bytes));
    return descriptor;
}

void *Memory::import_block(int descriptor, const std::string &description) {
    if (description.size() != LEASEHOLD_SHARED_BYTES) {
        throw Failure(LEASEHOLD_INVALID_ARGUMENT, "this is no description of a shared block");
    }
    void *block = nullptr;
    auto *bytes = reinterpret_cast<const uint8_t *>(description.data());
    check(library_.block_import(device_, descriptor, bytes, &block));
    return block;
}

void Memory::close_block(void *block) {
    refuse_in_capture();
    check(library_.device_synchronize(device_));
    check(library_.block_close(device_, block));
}

// ---- regions

leasehold_pool Memory::make_region(const std::string &name, uint32_t policy) {
    auto options = sized<leasehold_pool_options>();
    options.name = name.c_str();
    options.policy = policy;
    options.flags = LEASEHOLD_POOL_SUSPENDABLE;
    leasehold_pool made = 0;
    check(library_.pool_create(device_, &options, &made));
    return made;
}

void *Memory::region_allocate(leasehold_pool region, size_t bytes, uintptr_t stream) {
    void *block = nullptr;
    check(library_.pool_malloc(region, bytes, stream, &block));
    return block;
}

uint64_t Memory::suspend(leasehold_pool region, bool keep) {
    refuse_in_capture();
    uint64_t freed = 0;
    check(library_.pool_suspend(region, keep ? LEASEHOLD_SUSPEND_KEEP : 0, &freed));
    return freed;
}

void Memory::resume(leasehold_pool region) {
    try {
        check(library_.pool_resume(region));
    } catch (const Failure &failure) {
        bool memory =
            failure.status == LEASEHOLD_OUT_OF_MEMORY || failure.status == LEASEHOLD_OVER_BUDGET;
        // The library takes back what it has free, but segments of unused arenas are blocks to it.
        if (!memory || !reclaim()) {
            throw;
        }
        check(library_.pool_resume(region));
    }
}

// ---- history

Context Memory::gather(bool allocation) {
    if (!has_history()) {
        return nullptr;
    }
    std::function<Context()> recorder;
    {
        std::lock_guard<std::mutex> guard(history_lock_);
        if (allocation ? history_.of_live || history_.of_allocations : history_.of_frees) {
            recorder = history_.recorder;
        }
    }
    // The recorder may wait for Python's lock.
    return recorder ? recorder() : nullptr;
}

void Memory::record_history(HistorySettings settings, bool clear) {
    note_segments();
    bool begins;
    {
        std::lock_guard<std::mutex> guard(history_lock_);
        begins = settings.enabled && (clear || !history_.enabled);
        history_ = std::move(settings);
        history_.most = std::max<size_t>(history_.most, 1);
        if (!history_.enabled) {
            // Without a history nobody follows where blocks and segments end.
            contexts_.clear();
            places_.clear();
        }
        if (clear || !history_.enabled) {
            events_.clear();
        }
        history_on_.store(history_.enabled || !trackers_.empty());
    }
    if (begins) {
        std::lock_guard<std::mutex> guard(segments_lock_);
        known_changes_ = changes();
        known_ = segments();
    }
}

/// Adds an event to the history, under its lock.
void Memory::keep(Event event) {
    if ((history_.skip >> event.kind & 1) == 0) {
        events_.push_back(std::move(event));
    }
    while (events_.size() > history_.most) {
        events_.pop_front();
    }
}

void Memory::emit(Event event) {
    event.notes = notes();
    std::vector<std::function<void(const Event &)>> trackers;
    {
        std::lock_guard<std::mutex> guard(history_lock_);
        trackers = trackers_;
        bool ends = event.kind == Event::FreeRequested || event.kind == Event::FreeCompleted;
        auto known = ends ? contexts_.find(event.address) : contexts_.end();
        if (known != contexts_.end()) {
            // As PyTorch's own: without a place of the free, that of the allocation.
            event.context = event.context ? event.context : known->second;
            if (event.kind == Event::FreeCompleted) {
                contexts_.erase(known);
            }
        } else if (event.kind == Event::Alloc && event.context && history_.of_live) {
            contexts_[event.address] = event.context;
        }
        if (!history_.of_allocations) {
            event.context = nullptr;
        }
        if (history_.enabled) {
            keep(event);
        }
    }
    for (auto &tracker : trackers) {
        tracker(event);
    }
}

/// Tells of the end of a block.
void Memory::emit_end(const Block &block, PoolId pool, const Context &context) {
    for (Event::Kind kind : {Event::FreeRequested, Event::FreeCompleted}) {
        emit({kind, block.address, block.bytes, block.stream, pool, clock(), context});
    }
}

/// A number that grows when memory comes, goes or moves.
uint64_t Memory::changes() { return raw_statistics().driver_calls + arena_changes_.load(); }

Segments Memory::segments() {
    Segments made;
    for (const Seen &seen : walk()) {
        auto &ranges = seen.expandable ? made.granules : made.whole;
        ranges[seen.segment] = {seen.segment_bytes, seen.pool};
    }
    return made;
}

// The library does not call back when it maps memory. So the ranges are compared with those of the
// last call, once per change. Trackers do not get these events: they would have to know of a
// segment before its memory goes.
void Memory::note_segments(const Context &context) {
    {
        std::lock_guard<std::mutex> guard(history_lock_);
        if (!history_.enabled) {
            return;
        }
    }
    Notes texts = notes();
    std::lock_guard<std::mutex> guard(segments_lock_);
    // Other threads may change the ranges meanwhile; what is left out comes with the next call.
    for (int attempt = 0; attempt < 4; ++attempt) {
        uint64_t before = changes();
        if (before == known_changes_) {
            return;
        }
        Segments now = segments();
        if (changes() != before) {
            continue;
        }
        std::lock_guard<std::mutex> history(history_lock_);
        auto note = [&](Event::Kind kind) {
            return [&, kind](uintptr_t at, size_t bytes, PoolId pool) {
                Context place = context;
                if (kind == Event::SegmentAlloc || kind == Event::SegmentMap) {
                    places_.add(at, bytes, context);
                } else {
                    place = place ? place : places_.find(at);
                    places_.remove(at, bytes);
                }
                place = history_.of_allocations ? place : nullptr;
                keep({kind, at, bytes, 0, pool, clock(), std::move(place), texts});
            };
        };
        missing(known_.whole, now.whole, note(Event::SegmentFree));
        without(known_.granules, now.granules, note(Event::SegmentUnmap));
        without(now.granules, known_.granules, note(Event::SegmentMap));
        missing(now.whole, known_.whole, note(Event::SegmentAlloc));
        known_ = std::move(now);
        known_changes_ = before;
        return;
    }
}

Context Memory::context_of(uintptr_t address) {
    std::lock_guard<std::mutex> guard(history_lock_);
    auto found = contexts_.find(address);
    return found == contexts_.end() ? nullptr : found->second;
}

void Memory::note(Event event) {
    if (has_history()) {
        emit(std::move(event));
    }
}

std::vector<Event> Memory::events() {
    std::lock_guard<std::mutex> guard(history_lock_);
    return {events_.begin(), events_.end()};
}

void Memory::add_tracker(std::function<void(const Event &)> tracker) {
    std::lock_guard<std::mutex> guard(history_lock_);
    trackers_.push_back(std::move(tracker));
    history_on_.store(true);
}

} // namespace leasehold_torch
