/* leasehold.h: memory of CUDA and CPU devices, for frameworks with streams of their own. C11 and C++17.
 *
 * Results
 *  - A function that can fail returns a status: LEASEHOLD_OK (0) or one of LEASEHOLD_*. After a failure nothing has changed, unless the
 *    function says otherwise, and leasehold_last_error has the text. The text of LEASEHOLD_OUT_OF_MEMORY is the whole report: where the
 *    memory is, who holds it, what was tried and what to do.
 *  - After LEASEHOLD_DEVICE_LOST nothing in this process brings the device back, nor does a new leasehold_device_open. Its blocks may still
 *    be freed. Start the process anew; other devices go on.
 *  - No function panics, throws, unwinds or aborts. A handle or a block that is unknown, was closed or was freed is
 *    LEASEHOLD_INVALID_ARGUMENT.
 *  - On a host without memory a call is carried out with memory that the library set aside, or is LEASEHOLD_OUT_OF_MEMORY. The process ends
 *    only if there is none for the start of a thread (a device's first copy), or for a snapshot, a report or a walk of very many blocks.
 *  - A struct begins with its size in bytes: the caller sets it to sizeof. The library reads and writes no more than that.
 *
 * Threads
 *  - Any thread may call any function at any time; not from signal handlers, and not from functions that the driver calls on a stream.
 *    The text of the last error belongs to the thread.
 *  - leasehold_malloc of memory that is there, leasehold_free and leasehold_record_stream do not block. Other functions may block on the
 *    driver; leasehold_malloc does when it needs new memory. If there is none, it waits for work that still uses free memory, 30 seconds at
 *    most, and at last for all work of the device's streams. A request for more than the device has fails at once.
 *  - A device or a pool may be closed while other threads use it: either the closing call or the other one fails. A block that was given
 *    has memory until it is freed.
 *  - In a child of fork() whose parent opened a device every function with a status is LEASEHOLD_INVALID_STATE, on CPU devices too: the child
 *    must call exec before it opens devices of its own.
 *
 * Streams
 *  - On a CUDA device a stream is a CUstream (cudaStream_t) of the device's primary context, as an integer. The library does not see
 *    what is submitted there. 0 and 1 mean the legacy default stream, 2 the calling thread's default stream.
 *  - A block may be used on the stream of its allocation at once. When it is freed, all its work was submitted; the stream need not be
 *    done with it. The same stream may get the memory again at once, without a call of the driver. Another stream gets it only once an
 *    event says that the work is over, or after it was made to wait for such an event. The event is recorded when it is needed.
 *  - A block that other streams use is told of them by leasehold_record_stream. Its memory waits for all of them.
 *  - The owner of a stream calls leasehold_stream_end before it destroys the stream. Nobody can record an event on a stream that was
 *    destroyed without it, and the driver need not survive the attempt. Its free memory is for others again after
 *    leasehold_device_synchronize, which uses no stream's handle. If the driver says that a stream is gone, an allocation that finds
 *    nothing else waits for all work of the context. The handle may come back as another stream's:
 *    synchronize before that.
 *  - On a thread's default stream a free records an event at once: no other thread can do so later. The end of the thread ends the stream.
 *  - A stream in capture: allocation and free on it work as ever, and memory that is freed on it stays with it until the capture is over.
 *    A wait for all work of the context ends every capture in it without a graph: leasehold_device_synchronize and leasehold_pool_suspend do
 *    so. An allocation that finds no memory waits for the other streams by events. It waits for the context only if a stream is gone and
 *    no stream that was used here is in capture. No other call of this library breaks a capture.
 *    Blocks that a captured graph uses come from a pool that lives as long as the graph.
 *  - On a CPU device streams mean nothing: freed memory is free.
 */
#ifndef LEASEHOLD_H
#define LEASEHOLD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- statuses ---- */

#define LEASEHOLD_OK 0
#define LEASEHOLD_INVALID_ARGUMENT 1 /* never valid, or an unknown handle or block */
#define LEASEHOLD_OUT_OF_MEMORY 2    /* the text is the report */
#define LEASEHOLD_OVER_BUDGET 3      /* the request alone is larger than the budget */
#define LEASEHOLD_NOT_FOUND 4        /* no such device */
#define LEASEHOLD_UNAVAILABLE 5      /* no driver, or no such backend in this build */
#define LEASEHOLD_UNSUPPORTED 6      /* the device cannot do this */
#define LEASEHOLD_INVALID_STATE 7    /* valid at another time */
#define LEASEHOLD_SUSPENDED 8        /* the pool is suspended */
#define LEASEHOLD_IN_USE 9           /* blocks or pools are still held */
#define LEASEHOLD_TIMEOUT 10
#define LEASEHOLD_DEVICE_LOST 11 /* everything on the device is lost, until the process ends; blocks may still be freed */
#define LEASEHOLD_DRIVER 12      /* the vendor's driver refused a call */
#define LEASEHOLD_INTERNAL 13    /* a defect of the library */
#define LEASEHOLD_COMPILE 14     /* a kernel's source does not compile; the text is the compiler's */
#define LEASEHOLD_FAILED 15      /* work of a stream failed: a kernel, a check, a function of the caller's */
#define LEASEHOLD_PEER_LOST 16   /* another rank is gone, or has ended the communicator */
#define LEASEHOLD_MISMATCH 17    /* two ranks make different calls; the text has both */

/* The version of the ABI. A library with a higher number has all that this header has. */
#define LEASEHOLD_ABI_VERSION 2
uint32_t leasehold_abi_version(void);

/* The text of the calling thread's last failure; "" before the first. Valid until the thread's next failure: a call beside it in one
 * expression may come first or last. */
const char *leasehold_last_error(void);

/* Writes the same text to a buffer of size bytes, cut to fit between two letters of UTF-8, with a zero byte at its end. Returns the length
 * of the full text without the zero byte. With NULL or size 0 it writes nothing. */
size_t leasehold_error_text(char *buffer, size_t size);

/* Frees a text that a function returned. NULL is no error. */
void leasehold_text_free(char *text);

/* ---- devices ---- */

/* Handles. 0 is none. */
typedef uint64_t leasehold_device;
typedef uint64_t leasehold_pool;

/* When free granules (2 MiB on CUDA) are moved to where they are needed, instead of taking new memory: while that is rare; only when
 * there is no other memory; always. */
#define LEASEHOLD_POLICY_BALANCED 0
#define LEASEHOLD_POLICY_FASTEST 1
#define LEASEHOLD_POLICY_COMPACT 2

#define LEASEHOLD_DEVICE_SHAREABLE 1 /* leasehold_block_export works for blocks of the main memory */

typedef struct leasehold_device_options {
    size_t size;
    uint64_t budget;       /* bytes that all pools together take from the driver at most, without the buffers of leasehold_runtime.h; 0: no limit */
    uint32_t policy;       /* of the main memory */
    uint32_t trace_events; /* events that a snapshot has, for each pool, of 48 bytes of host memory; 2^24 at most; 0: none, and no cost */
    uint32_t flags;        /* LEASEHOLD_DEVICE_* */
} leasehold_device_options;

/* Opens a device: "cuda:0" (its primary context, shared with whoever else uses it), "cpu:0", and "sim-cuda:0" in libleasehold_capi_sim. Each
 * open device has memory, pools and a budget of its own. options may be NULL. May block on the driver's start. */
int leasehold_device_open(const char *name, const leasehold_device_options *options, leasehold_device *device);

/* Closes a device. LEASEHOLD_IN_USE while blocks or pools of it are held, or runtimes are open. A call of another thread that would give a
 * block, a pool or a runtime of a closed device is LEASEHOLD_INVALID_ARGUMENT. */
int leasehold_device_close(leasehold_device device);

typedef struct leasehold_device_info {
    size_t size;
    uint64_t total_bytes; /* of the device */
    uint64_t free_bytes;  /* that no process uses */
    uint64_t streams;     /* of the caller that the library knows */
    char name[128];       /* the product's, cut to fit */
} leasehold_device_info;

int leasehold_device_describe(leasehold_device device, leasehold_device_info *info);

/* Blocks until all work of the device's primary context is over, also on streams that the library does not know. Memory that was freed
 * before is for every stream then, also that of streams that were destroyed. Fails while a stream of the context is in capture, and the
 * driver breaks that capture. */
int leasehold_device_synchronize(leasehold_device device);

/* Lets work of a device use the memory of another one (owner), which it has now or takes later, in all pools. *allowed: 1 if it can, 0 if the
 * two cannot reach each other. With NULL that is LEASEHOLD_UNSUPPORTED. */
int leasehold_device_enable_peer(leasehold_device device, leasehold_device owner, int *allowed);

/* ---- blocks ---- */

/* Allocates bytes for a stream, aligned to 256 at least. The contents are unspecified. Zero bytes give NULL. The block is one of the
 * main memory, or of a pool that takes allocations on this stream (leasehold_pool_begin). If there is no memory, the library moves free
 * granules, takes back what other movable pools have free, and waits for streams, before it fails. */
int leasehold_malloc(leasehold_device device, size_t bytes, uintptr_t stream, void **block);

/* Frees a block, also one of a pool. NULL is no error. */
int leasehold_free(leasehold_device device, void *block);

/* Notes that another stream uses a block, until it is freed. The stream of its allocation changes nothing. NULL is no error. */
int leasehold_record_stream(leasehold_device device, void *block, uintptr_t stream);

/* The same for a stream of another device, which may use this one's memory (leasehold_device_enable_peer). */
int leasehold_record_peer_stream(leasehold_device device, void *block, leasehold_device peer, uintptr_t stream);

/* Ends a stream, before its owner destroys it: its last event is recorded, and the handle may mean another stream afterwards. A stream
 * that the library does not know is no error. LEASEHOLD_INVALID_STATE in a capture. If the stream was destroyed already, it waits for all
 * work of the context. */
int leasehold_stream_end(leasehold_device device, uintptr_t stream);

/* Finds the block that an address lies in: its first address, its bytes as asked for, its pool (0: the main memory). Each answer may be
 * NULL. Fast for the first address, a walk for others. */
int leasehold_block_find(leasehold_device device, const void *address, void **base, size_t *bytes, leasehold_pool *pool);

/* Names a block in reports and snapshots, until it is freed. */
int leasehold_block_set_name(leasehold_device device, void *block, const char *name);

/* ---- the memory as a whole ---- */

/* Gives free memory of the main memory and of movable pools back to the driver, until keep bytes lie free in each. Memory that a stream may still use stays, so
 * leasehold_device_synchronize before it gives back more. *freed (or NULL): the bytes that went. */
int leasehold_trim(leasehold_device device, uint64_t keep, uint64_t *freed);

/* Sets the most bytes that all pools together take from the driver; 0: no limit. Never exceeded. A lower one than what is taken stops
 * growth; leasehold_trim gives back. */
int leasehold_set_budget(leasehold_device device, uint64_t bytes);

/* All pools together. Bytes of blocks are as asked for. */
typedef struct leasehold_stats {
    size_t size;
    uint64_t allocated_bytes; /* of blocks that the caller holds */
    uint64_t allocated_bytes_peak;
    uint64_t allocated_bytes_total; /* ever */
    uint64_t freed_bytes_total;     /* ever */
    uint64_t blocks;                /* that the caller holds */
    uint64_t blocks_peak;
    uint64_t allocations;    /* ever */
    uint64_t frees;          /* ever */
    uint64_t reserved_bytes; /* taken from the driver */
    uint64_t reserved_bytes_peak;
    uint64_t budget_bytes;       /* UINT64_MAX: no limit */
    uint64_t free_ready_bytes;   /* for every stream */
    uint64_t free_pending_bytes; /* a stream may still use them */
    uint64_t free_cached_bytes;  /* in thread caches and slabs */
    uint64_t unmapped_bytes;     /* physical memory in hand that is mapped nowhere */
    uint64_t retries;            /* allocations tried again after pools gave memory back */
    uint64_t failures;           /* allocations that failed */
    uint64_t growths;            /* times that memory was taken from the driver */
    uint64_t remaps;             /* times that free granules were moved */
    uint64_t host_waits;         /* of the host for a stream */
    uint64_t stream_waits;       /* of a stream for another one's memory */
    uint64_t driver_calls;       /* for memory */
    uint64_t pools;              /* the main memory included */
    uint64_t metadata_bytes;     /* host memory of the library's tables */
} leasehold_stats;

int leasehold_stats_get(leasehold_device device, leasehold_stats *stats);

/* The largest free range of any pool that has memory behind it. A walk. Larger blocks may be had without new memory, since free granules can
 * be moved. */
int leasehold_largest_free(leasehold_device device, uint64_t *bytes);

/* Begins new peaks from what is allocated and reserved now. */
int leasehold_stats_reset_peaks(leasehold_device device);

/* The state of all memory as JSON: {"device", "budget", "reserved", "allocated", "pools": [{"pool", "name", "suspended", "memory":
 * {"stats", "segments": [{"addr", "bytes", "paged", "blocks": […]}], "events", …}}], "streams": {timeline: stream}}. The caller frees the
 * text by leasehold_text_free. Takes the allocators' locks for a walk. */
int leasehold_snapshot(leasehold_device device, char **json);

/* A page about all memory: one HTML file that loads nothing. Live and reserved bytes over time and the largest holders at the peak (with
 * leasehold_device_options.trace_events), each segment as a strip of blocks, fragmentation, events, statistics. The caller frees the text by
 * leasehold_text_free. Takes the allocators' locks for a walk. */
int leasehold_report(leasehold_device device, char **html);

#define LEASEHOLD_BLOCK_LIVE 0    /* the caller holds it */
#define LEASEHOLD_BLOCK_FREE 1    /* for every stream */
#define LEASEHOLD_BLOCK_PENDING 2 /* free; a stream may still use it */
#define LEASEHOLD_BLOCK_CACHED 3  /* free, in a thread cache or on its way */
#define LEASEHOLD_BLOCK_OTHER 4   /* moving, held back, or lost to a failed call */

typedef struct leasehold_block {
    size_t size;
    leasehold_pool pool;      /* 0: the main memory */
    uint64_t segment_address; /* the range with memory around the block */
    uint64_t segment_bytes;
    uint64_t address;
    uint64_t bytes;           /* rounding included */
    uint64_t requested_bytes; /* 0 unless live */
    uintptr_t stream;         /* of its allocation (live) or that may use it (pending); 0: unknown */
    uint32_t state;           /* LEASEHOLD_BLOCK_* */
    uint32_t expandable;      /* 1: the segment is made of granules */
} leasehold_block;

/* Calls visitor with every block of every pool, by address within a pool; the blocks of a segment tile it. The state is that of one
 * moment for each pool. */
int leasehold_visit_blocks(leasehold_device device, void (*visitor)(void *context, const leasehold_block *block), void *context);

/* ---- other processes ---- */

#define LEASEHOLD_SHARED_BYTES 128

/* A descriptor of a block and its description, for another process of the same machine and device. The descriptor is the caller's, which
 * closes it: it goes over a Unix socket. Of a device that was opened with LEASEHOLD_DEVICE_SHAREABLE, whose main memory has one handle for each
 * segment and is never moved; LEASEHOLD_UNSUPPORTED for other memory. Who has the descriptor can map the whole segment around the block.
 * The work with the block is over, or ordered by the caller, before the other process uses it. The caller keeps the block while it does. */
int leasehold_block_export(leasehold_device device, const void *block, int *descriptor, uint8_t *description);

/* Maps a block that a process exported. The descriptor stays the caller's. LEASEHOLD_INVALID_ARGUMENT for a descriptor that is no such
 * memory, and for a description of another device. The memory outlives its owner. leasehold_free does not take it. */
int leasehold_block_import(leasehold_device device, int descriptor, const uint8_t *description, void **block);

/* Unmaps it. No work uses it any more: synchronize first. */
int leasehold_block_close(leasehold_device device, void *block);

/* ---- pools: memory for a captured graph, or for a region of the program ---- */

#define LEASEHOLD_POOL_SUSPENDABLE 1 /* leasehold_pool_suspend works */
#define LEASEHOLD_POOL_MOVABLE 2     /* memory under free blocks may be moved and taken back: no captured graph uses it */

typedef struct leasehold_pool_options {
    size_t size;
    const char *name; /* in reports; may be NULL */
    uint32_t policy;  /* LEASEHOLD_POLICY_* */
    uint32_t flags;   /* LEASEHOLD_POOL_* */
} leasehold_pool_options;

/* Makes a pool: memory with addresses of its own, which counts against the device's budget. options may be NULL. Without
 * LEASEHOLD_POOL_MOVABLE memory that the pool once took stays mapped where it is, also under blocks that were freed, until the pool is
 * released or trimmed by leasehold_pool_trim: a captured graph uses such addresses at each launch. LEASEHOLD_UNSUPPORTED
 * for LEASEHOLD_POOL_SUSPENDABLE on a device whose addresses and memory are not separate. */
int leasehold_pool_create(leasehold_device device, const leasehold_pool_options *options, leasehold_pool *pool);

/* Lets go of a pool. Its blocks stay valid, and are freed as ever; with the last of them its memory goes back to the driver. A graph that
 * uses freed blocks of the pool must not run any more. LEASEHOLD_SUSPENDED while it is suspended and blocks of it are held: nothing could give
 * them memory again. Blocks may be freed meanwhile, and a suspended pool without blocks is released. */
int leasehold_pool_release(leasehold_pool pool);

/* Allocates a block of a pool. LEASEHOLD_SUSPENDED while it is suspended. */
int leasehold_pool_malloc(leasehold_pool pool, size_t bytes, uintptr_t stream, void **block);

/* From now on leasehold_malloc takes blocks from the pool on streams for which filter returns another number than 0; NULL: on all. Of
 * several pools the one that began first is asked first. The filter may be called by any thread until leasehold_pool_end has returned
 * and each leasehold_malloc that began before it. It must not call this library. */
int leasehold_pool_begin(leasehold_pool pool, int (*filter)(void *context, uintptr_t stream), void *context);
int leasehold_pool_end(leasehold_pool pool);

/* As leasehold_trim, for one pool, movable or not: no captured graph uses its free memory any more. A suspended pool gives nothing back. */
int leasehold_pool_trim(leasehold_pool pool, uint64_t keep, uint64_t *freed);

#define LEASEHOLD_SUSPEND_KEEP 1 /* the contents are copied to pinned host memory */

/* Gives all memory of a pool back to the device and keeps the addresses, so that pointers, views and captured graphs stay valid. Waits for
 * all work of the context first. No work may use the pool's blocks until it is resumed. *freed (or NULL): the bytes that went. Without
 * LEASEHOLD_SUSPEND_KEEP the contents are lost. After a failure nothing has changed; only if a copy failed, and the memory that went before
 * cannot be taken again, is the pool suspended, and leasehold_pool_resume brings it back. */
int leasehold_pool_suspend(leasehold_pool pool, uint32_t flags, uint64_t *freed);

/* Takes memory again at the same addresses, with the contents that were kept. If there is no memory, the library takes back what the main
 * memory and movable pools have free, and waits for streams, before it fails. Movable pools take none for blocks that were freed meanwhile.
 * After a failure the pool is still suspended, with its contents and addresses, and the call may be repeated: LEASEHOLD_OUT_OF_MEMORY, or
 * LEASEHOLD_OVER_BUDGET if blocks, other pools and this one need more than the budget together. */
int leasehold_pool_resume(leasehold_pool pool);

/* ---- the functions of PyTorch's CUDAPluggableAllocator ---- */

/* Device N is opened as "cuda:N" at its first use, unless a device was given here before; 0 takes it back. */
int leasehold_plugin_set_device(int ordinal, leasehold_device device);
/* The options of devices that are opened so; NULL: the default ones. */
int leasehold_plugin_set_options(const leasehold_device_options *options);
/* Device N; 0 if it was not opened yet, unless open is another number than 0. */
int leasehold_plugin_get_device(int ordinal, int open, leasehold_device *device);

/* Sets what a failed allocation calls, with a text and the place; NULL for nothing. It may throw a C++ exception, which passes
 * leasehold_plugin_alloc. PyTorch's c10::detail::torchCheckFail is such a function. It must be valid until another one is set. */
int leasehold_plugin_set_raise(void (*raise)(const char *function, const char *file, uint32_t line, const char *text));

/* leasehold_malloc and leasehold_free by ordinal. NULL for zero bytes, and for a failure (leasehold_last_error has the text) unless the
 * function of leasehold_plugin_set_raise throws. PyTorch does not check the result: it uses a null pointer. */
void *leasehold_plugin_alloc(ptrdiff_t size, int ordinal, void *stream);
void leasehold_plugin_free(void *block, ptrdiff_t size, int ordinal, void *stream);
/* leasehold_record_stream on the device that the block belongs to. */
void leasehold_plugin_record_stream(void *block, void *stream);
/* For set_begin_allocate_to_pool: there are no private pools here, so it calls the function of leasehold_plugin_set_raise. */
void leasehold_plugin_refuse_pool(void);

/* ---- simulated devices: "sim-cuda:0" and "sim-cuda:1" of 1 GiB, in libleasehold_capi_sim only ---- */

#ifdef LEASEHOLD_SIM

/* Makes a stream (kind 0), or that of a default stream's handle: 1 the legacy one, 2 the calling thread's. */
int leasehold_sim_stream(leasehold_device device, int kind, uintptr_t *stream);
int leasehold_sim_stream_destroy(leasehold_device device, uintptr_t stream);
/* Fills memory with a byte, on a stream. */
int leasehold_sim_fill(leasehold_device device, uintptr_t stream, void *at, uint8_t byte, size_t bytes);
/* Copies memory of the device to the host, after the stream's work, and waits. */
int leasehold_sim_read(leasehold_device device, uintptr_t stream, void *to, const void *from, size_t bytes);
/* Lets later work of one stream wait for the work that another has now. */
int leasehold_sim_order(leasehold_device device, uintptr_t earlier, uintptr_t later);
/* Begins (1) or ends (0) a capture of a stream; 2 begins one that forbids calls to all threads. */
int leasehold_sim_capture(leasehold_device device, uintptr_t stream, int begin);
/* The races that were found since the last call, one a line; "" for none. Freed by leasehold_text_free. */
int leasehold_sim_races(char **text);
/* Calls of the driver by name so far. */
uint64_t leasehold_sim_calls(const char *name);

#endif

#ifdef __cplusplus
}
#endif

#endif
