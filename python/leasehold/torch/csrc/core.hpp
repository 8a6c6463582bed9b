// The memory of one device over leasehold.h: blocks, pools, statistics and history.
//
// This part knows neither PyTorch nor CUDA, so that it can be tested over a simulated device.
//
// Any thread may call any function. Functions that take memory may block on the driver; the
// recorder and the trackers of the history are called without a lock.
#pragma once

#include "arena.hpp"
#include "library.hpp"
#include "table.hpp"

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace leasehold_torch {

/// A failure with a status of leasehold.h and its text.
struct Failure : std::runtime_error {
    Failure(int status, const std::string &text) : std::runtime_error(text), status(status) {}
    int status;
};

/// A number as PyTorch counts it.
struct Count {
    int64_t current = 0, peak = 0, allocated = 0, freed = 0;
    void add(int64_t by) {
        current += by;
        allocated += by;
        if (current > peak) {
            peak = current;
        }
    }
    void sub(int64_t by) {
        current -= by;
        freed += by;
    }
    /// Follows a number that was read elsewhere.
    void follow(int64_t now, int64_t highest) {
        (now > current) ? allocated += now - current : freed += current - now;
        current = now;
        peak = highest > now ? highest : now;
    }
};

/// All, small (at most 1 MiB) and large.
using Counts = std::array<Count, 3>;

struct Statistics {
    Counts blocks, bytes;
    Count reserved, segments, unused; // `unused`: reserved and not allocated
    int64_t retries = 0, failures = 0, host_waits = 0, growths = 0, trims = 0;
};

/// A frame of the history's recorder, which this part only carries.
using Context = std::shared_ptr<void>;

/// Texts that the program had set when an event came.
struct Notes {
    std::string region, metadata;
};

/// An identifier of a private pool.
using PoolId = std::pair<uint64_t, uint64_t>;

/// An event of the history.
struct Event {
    enum Kind {
        Alloc,
        FreeRequested,
        FreeCompleted,
        SegmentAlloc, // of a private pool, whole
        SegmentFree,
        SegmentMap, // a part of a segment that is made of granules
        SegmentUnmap,
        Snapshot,
        Oom
    };
    Kind kind;
    uintptr_t address;
    size_t bytes;
    uintptr_t stream;
    PoolId pool;
    uint64_t time;
    Context context;
    Notes notes = {};
};

/// The memory of a pool of its own.
struct Pool {
    PoolId id;
    int uses = 0;
    bool split = true;
    bool last_resort = false; // other allocations may have its free memory before they fail
    leasehold_pool region = 0; // blocks come from there one by one, and it can be suspended
    std::unique_ptr<Arena> arena; // without a region
    size_t live = 0;              // blocks that PyTorch holds
};

/// A block in a walk.
struct Seen {
    PoolId pool;
    uintptr_t segment;
    size_t segment_bytes;
    uintptr_t address;
    size_t bytes;
    size_t requested;
    uintptr_t stream;
    bool live, pending, expandable;
    Context context;         // of the block
    Context segment_context; // of its segment
};

/// The memory that blocks lie in, by address: of private pools in whole segments, and of the rest
/// in ranges that grow and shrink by granules.
struct Segments {
    using Ranges = std::map<uintptr_t, std::pair<size_t, PoolId>>;
    Ranges whole, granules;
};

/// Where the program took memory, by ranges of addresses.
class Places {
  public:
    void add(uintptr_t at, size_t bytes, const Context &context);
    void remove(uintptr_t at, size_t bytes);
    Context find(uintptr_t at) const;
    void clear() { ranges_.clear(); }

  private:
    std::map<uintptr_t, std::pair<uintptr_t, Context>> ranges_; // by begin: end and place
};

/// The settings of the history.
struct HistorySettings {
    bool enabled = false;
    size_t most = 0;
    uint32_t skip = 0; // a bit for each kind of event that is left out
    bool of_live = false, of_allocations = false, of_frees = false; // contexts of
    std::function<Context()> recorder;
};

/// The state of a private pool.
struct Checkpoint {
    PoolId id;
    Pieces pieces;
};

/// The blocks that a restoration freed and allocated.
struct Restored {
    std::vector<uintptr_t> freed, allocated;
};

class Memory {
  public:
    /// Opens a device. `name` is as for leasehold_device_open.
    Memory(const Library &library, const std::string &name, uint64_t budget, uint32_t policy,
           bool shareable = false);

    // ---- blocks

    /// Allocates a block; nullptr for no bytes.
    void *allocate(size_t bytes, uintptr_t stream);
    /// Frees a block. Returns its bytes, 0 if it is unknown here.
    size_t free(void *block);
    /// Notes that another stream uses a block; of another device if `peer` is not 0.
    void record_stream(void *block, uintptr_t stream, leasehold_device peer = 0);
    /// The block that begins at an address; its address is 0 if it is unknown.
    Block find(void *block);

    // ---- the memory as a whole

    leasehold_device device() const { return device_; }
    /// Gives back what lies free: of one pool that has ended, or of all and the main memory.
    void empty_cache(PoolId id = {});
    /// Blocks until all work of the device is over. Returns false, and breaks nothing, while a
    /// stream is in a capture, on this thread or on another.
    bool synchronize();
    /// Bounds what the library and the pools' own sources take; 0 for no limit.
    void set_budget(uint64_t bytes);
    uint64_t budget();
    Statistics statistics();
    leasehold_stats raw_statistics();
    void reset_peaks();
    void reset_accumulated();
    uint64_t largest_free();
    std::pair<uint64_t, uint64_t> free_and_total();
    std::vector<Seen> walk();

    // ---- private pools

    /// Makes a pool or counts one use more. `source` or `region` say where its memory comes from.
    void use_pool(PoolId id, Source source = {}, leasehold_pool region = 0);
    void set_last_resort(PoolId id, bool on);
    void set_no_split(PoolId id);
    /// Sends allocations to a pool, on streams for which the filter says so.
    void begin_pool(PoolId id, std::function<bool(uintptr_t)> filter);
    void end_pool(PoolId id);
    /// Counts one use less.
    void release_pool(PoolId id);
    int pool_uses(PoolId id);
    /// The blocks of a pool that PyTorch holds.
    std::vector<uintptr_t> live_blocks(PoolId id);
    Checkpoint checkpoint(PoolId id);
    Restored restore(const Checkpoint &checkpoint);

    // ---- other processes

    /// A descriptor of a block, which is the caller's, and the block's description.
    int export_block(void *block, std::string &description);
    /// Maps a block of another process. The descriptor stays the caller's.
    void *import_block(int descriptor, const std::string &description);
    /// Unmaps it, once all work of the device is over.
    void close_block(void *block);

    // ---- regions

    leasehold_pool make_region(const std::string &name, uint32_t policy);
    void *region_allocate(leasehold_pool region, size_t bytes, uintptr_t stream);
    uint64_t suspend(leasehold_pool region, bool keep);
    void resume(leasehold_pool region);

    // ---- history

    void record_history(HistorySettings settings, bool clear);
    bool has_history() const { return history_on_.load(std::memory_order_relaxed); }
    std::vector<Event> events();
    /// Where a block was allocated, if the history has it.
    Context context_of(uintptr_t address);
    void note(Event event);
    /// Adds to the history what memory came and went since the last call, and where the call was.
    void note_segments(const Context &context = nullptr);
    /// Where the program is now, if the history has that of allocations or of frees.
    Context gather(bool allocation);
    void add_tracker(std::function<void(const Event &)> tracker);

    /// Reads the clock of the events.
    std::function<uint64_t()> clock;
    /// Reads the texts of the program for an event.
    std::function<Notes()> notes;
    /// The calling thread's stream.
    std::function<uintptr_t()> current_stream;
    /// Says whether a stream is in a capture.
    std::function<bool(uintptr_t)> is_captured;

  private:
    /// Allocations that go to a pool.
    struct Route {
        PoolId id;
        std::function<bool(uintptr_t)> filter;
        uintptr_t stream; // of the thread that began it; a capture of the pool is there
    };

    void check(int status) const;
    void end_begun(uintptr_t stream);
    bool is_capturing();
    void refuse_in_capture();
    Pool *route(uintptr_t stream);
    /// A block of a pool; 0 with the status if there is no memory.
    uintptr_t take(Pool *pool, size_t bytes, uintptr_t stream, int &status);
    /// Tries all that is left. Without the lock.
    uintptr_t take_pressed(Block block, int status);
    bool reclaim(PoolId id = {});
    void count(const Block &block, void (Count::*change)(int64_t));
    void insert(const Block &block);
    Pool &pool_of(PoolId id);
    Source own_source();
    Source counted(Source source);
    Source bounded(Source source);
    bool make_room(size_t bytes);
    void bound();
    bool drop_if_unused(PoolId id);
    void emit(Event event);
    void emit_end(const Block &block, PoolId pool, const Context &context);
    void keep(Event event);
    uint64_t changes();
    Segments segments();

    const Library &library_;
    leasehold_device device_ = 0;
    leasehold_pool graphs_ = 0; // where arenas have their segments; guarded by lock_
    std::atomic<uint32_t> routes_{0};
    std::atomic<bool> history_on_{false};
    std::atomic<uint64_t> arena_changes_{0}; // segments that arenas took and gave back

    std::mutex lock_;
    uint64_t budget_ = 0; // 0: no limit
    size_t foreign_ = 0;  // bytes of segments from pools' own sources
    Table blocks_;
    Counts counts_, bytes_;
    Count reserved_, segments_, unused_;
    leasehold_stats base_ = {}; // what was before the last reset
    int64_t failures_ = 0, trims_ = 0;
    std::map<PoolId, std::unique_ptr<Pool>> pools_;
    std::vector<Route> underway_;
    std::unordered_map<uintptr_t, std::vector<uintptr_t>> others_; // streams of arenas' blocks

    std::mutex begun_lock_; // after lock_; held in waits for the device
    std::vector<uintptr_t> begun_; // the streams of the routes

    std::mutex segments_lock_; // before lock_ and history_lock_
    Segments known_;           // what the history tells, as of `known_changes_`
    uint64_t known_changes_ = 0;

    std::mutex history_lock_;
    HistorySettings history_;
    std::deque<Event> events_;
    std::unordered_map<uintptr_t, Context> contexts_; // of blocks
    Places places_;                                   // of `known_`
    std::vector<std::function<void(const Event &)>> trackers_;
};

} // namespace leasehold_torch
