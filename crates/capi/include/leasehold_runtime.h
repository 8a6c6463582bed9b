/* leasehold_runtime.h: the runtime of a device: buffers, streams, events, kernels, graphs, ranks. C11 and C++17.
 *
 * It comes beside leasehold.h, which has statuses, devices, and memory for frameworks with streams of their own. What that header says of
 * results, structs, threads and fork() holds here.
 *
 * Objects
 *  - An object has a handle of 64 bits; 0 is none. Its maker holds it. leasehold_*_retain adds a holder, leasehold_*_release takes one away;
 *    the last one ends the object. Neither blocks, and any order of releases is right: work that was submitted keeps what it needs.
 *  - A handle that is unknown, stale or of another kind is LEASEHOLD_INVALID_ARGUMENT, on any thread. A call that runs while another thread
 *    releases its object ends as if it had come before.
 *
 * Order
 *  - A stream works in the order of its calls. Between streams the order comes from the operands: an operation begins after the earlier
 *    uses of its operands, whatever stream they were on. Nothing else need be said.
 *  - No function waits for the device, unless its name has synchronize, wait_all, wait_any, blocking or close. A function that submits work
 *    pauses while about 8,192 operations of the stream are pending; after 30 seconds in which none of them ends it is LEASEHOLD_TIMEOUT.
 *    An allocation that finds no memory waits for work that still uses free memory, 30 seconds at most, and only if that memory is enough.
 *  - A time limit is in nanoseconds. 0 polls, and LEASEHOLD_FOREVER is none.
 *  - Work that failed poisons its stream: from then on each call there is that failure. Take another stream to go on. Buffers that the work
 *    wrote hand the failure on, until they are overwritten as a whole: what reads them on another stream is refused with that failure, and
 *    its stream goes on. A failure that becomes known later, or that the stream was told to wait for, poisons that stream too.
 *  - LEASEHOLD_DEVICE_LOST is for good: the device stays lost until the process ends. Start the process anew; other devices go on.
 *
 * Functions of the caller
 *  - They return, and do not throw. They may call this library, but for what would wait for the stream that they run on. A kernel's check and
 *    the function of a foreign call run inside a call: what they call of this library is LEASEHOLD_INVALID_STATE.
 *  - A function with a context may have a release function: it is called once, on any thread, when the context is not needed any more. After
 *    a call that failed it is not: the context is still the caller's.
 *
 * Memory
 *  - Buffers come from the device's own allocator, which all its runtimes share. The budget and the numbers of leasehold.h are those of
 *    leasehold_malloc and its pools.
 *  - A stream here is not the integer of leasehold.h. leasehold_stream_wait_native and leasehold_stream_precede_native order the two.
 *    leasehold_stream_native gives the integer of one here, whose work leasehold_malloc and
 *    leasehold_record_stream know as that of any other stream; leasehold_stream_end ends its use there, before the last release here.
 */
#ifndef LEASEHOLD_RUNTIME_H
#define LEASEHOLD_RUNTIME_H

#include "leasehold.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef uint64_t leasehold_runtime;
typedef uint64_t leasehold_buffer;
typedef uint64_t leasehold_stream;
typedef uint64_t leasehold_event;
typedef uint64_t leasehold_kernel;
typedef uint64_t leasehold_graph;
typedef uint64_t leasehold_host_timeline;

/* Says that a context is not needed any more. */
typedef void (*leasehold_release)(void *context);

/* ---- points ---- */

#define LEASEHOLD_FOREVER UINT64_MAX /* no limit of time */

/* A place in the order of a stream: all that was submitted up to it. A plain value, good for ever; all zero is over always. Functions that
 * submit write the point of their work to a pointer that may be NULL. On a stream of a recording, which runs nothing, that is all zero. Other
 * work that a thread submits to the stream meanwhile may be before the point too. Of a host timeline the first field is its handle, and
 * the caller writes the value. A point that was never submitted is LEASEHOLD_INVALID_ARGUMENT. */
typedef struct leasehold_point {
    uint64_t timeline;
    uint64_t value;
} leasehold_point;

/* Blocks until all points are over. The first failure, in their order. */
int leasehold_wait_all(leasehold_runtime runtime, const leasehold_point *points, size_t count, uint64_t timeout_ns);

/* Blocks until one of several points is over; *which: its place. No points are LEASEHOLD_INVALID_ARGUMENT. The answer may be late by a tenth
 * of a millisecond. */
int leasehold_wait_any(leasehold_runtime runtime, const leasehold_point *points, size_t count, uint64_t timeout_ns, size_t *which);

/* ---- runtimes ---- */

/* Opens the runtime of a device, which stays open until leasehold_runtime_close. All runtimes of one name ("cuda:0") are the same: they share
 * allocator and default stream. */
int leasehold_runtime_open(leasehold_device device, leasehold_runtime *runtime);

/* Waits until all work of the device's streams is over, and closes the runtime. What is pending when a program ends is lost, so a program
 * does this last. LEASEHOLD_TIMEOUT: the runtime is still open. Another failure is that of a stream's work, and the runtime is closed all the
 * same. Objects that were made with it stay good until they are released. */
int leasehold_runtime_close(leasehold_runtime runtime, uint64_t timeout_ns);

/* Blocks until all work of all streams of the device is over, and lets go of wrapped memory that waited for that. The first stream's
 * failure. */
int leasehold_runtime_synchronize(leasehold_runtime runtime, uint64_t timeout_ns);

#define LEASEHOLD_FEATURE_GRAPHS 1
#define LEASEHOLD_FEATURE_HOST_CALLS 2
#define LEASEHOLD_FEATURE_FOREIGN_CALLS 4
#define LEASEHOLD_FEATURE_HOST_TIMELINES 8
#define LEASEHOLD_FEATURE_TIMESTAMPS 16   /* events with LEASEHOLD_EVENT_TIMING */
#define LEASEHOLD_FEATURE_HOST_VISIBLE 32 /* the host reads and writes device memory at its address, while no work uses it */

typedef struct leasehold_runtime_info {
    size_t size;
    uint64_t allocated_bytes; /* of buffers that are held */
    uint64_t reserved_bytes;  /* that the allocator took from the driver */
    uint32_t features;        /* LEASEHOLD_FEATURE_* */
    uint32_t block_threads;   /* threads of a block, at most */
    uint32_t shared_bytes;    /* shared memory of a block, at most */
    uint32_t reserved;
    char device[32]; /* "cuda:0" */
} leasehold_runtime_info;

int leasehold_runtime_describe(leasehold_runtime runtime, leasehold_runtime_info *info);

/* A handle of the device's default stream. If that has failed, use streams of leasehold_stream_create. */
int leasehold_runtime_stream(leasehold_runtime runtime, leasehold_stream *stream);

/* ---- streams ---- */

typedef struct leasehold_stream_options {
    size_t size;
    const char *name; /* in reports and messages; may be NULL */
    int priority;     /* a greater number is more urgent; 0 is the default; clamped to the device's range */
    uint32_t reserved;
} leasehold_stream_options;

/* Makes a stream. options may be NULL. */
int leasehold_stream_create(leasehold_runtime runtime, const leasehold_stream_options *options, leasehold_stream *stream);
int leasehold_stream_retain(leasehold_stream stream);
/* Work that is pending goes on. A recording that goes on is given up with its stream's last holder. */
int leasehold_stream_release(leasehold_stream stream);

/* The driver's stream (CUstream), good while the stream is held; 0 where there is none. Work that is held back is sent first. What is
 * enqueued there by hand leaves no mark on buffers: leasehold_stream_foreign_call is the way that does. */
int leasehold_stream_native(leasehold_stream stream, uintptr_t *native);

/* *over: 1 if all work so far is over, else 0. The stream's failure, if it has one; so for the next. */
int leasehold_stream_query(leasehold_stream stream, int *over);
int leasehold_stream_synchronize(leasehold_stream stream, uint64_t timeout_ns);

/* The point of all work so far. */
int leasehold_stream_now(leasehold_stream stream, leasehold_point *point);

/* Lets later work of the stream begin after a point, of any stream of the process that the device can wait for, or of a host timeline. */
int leasehold_stream_wait_point(leasehold_stream stream, leasehold_point point);
/* The same for the last record of an event; one that was never recorded is not waited for. */
int leasehold_stream_wait_event(leasehold_stream stream, leasehold_event event);

/* Orders a stream with one of another library, by its handle: what leasehold.h says of streams holds for it, so its owner calls
 * leasehold_stream_end before it destroys the stream. Nobody waits on the host. leasehold_stream_wait_native lets later work of the stream begin
 * after all that was enqueued on the other one; leasehold_stream_precede_native lets later work of the other one begin after all work of this
 * one so far. The latter is LEASEHOLD_UNSUPPORTED on a CPU, and for work that waits for a host timeline: synchronize then. */
int leasehold_stream_wait_native(leasehold_stream stream, uintptr_t native);
int leasehold_stream_precede_native(leasehold_stream stream, uintptr_t native);

/* Makes sure that all work so far is on its way to the device. */
int leasehold_stream_flush(leasehold_stream stream);

/* *status: LEASEHOLD_OK for a sound stream, else the status of what failed first, with its text in leasehold_last_error. */
int leasehold_stream_failure(leasehold_stream stream, int *status);

int leasehold_stream_set_name(leasehold_stream stream, const char *name);

/* Calls a function once, when all work so far is over: with LEASEHOLD_OK, or with the status of its failure and the text in
 * leasehold_last_error of the thread that runs it. The call comes whatever happens to the stream, perhaps before this returns. It must not
 * block. */
int leasehold_stream_on_complete(leasehold_stream stream, void (*call)(void *context, int status), void *context);

/* ---- buffers ---- */

/* Allocates device memory, aligned to 256 at least, for first use on a stream; another stream's first use waits for what the memory was used
 * for before. The contents are unspecified. 0 bytes give an empty buffer. On a stream of a recording it is a temporary of the graph, which has
 * no address before the recording ends. LEASEHOLD_OUT_OF_MEMORY with a report, for more than the device has at once. May wait for other
 * work, 30 seconds at most, where nothing else makes the request fit: see Order. */
int leasehold_buffer_alloc(leasehold_stream stream, uint64_t bytes, leasehold_buffer *buffer);

/* Allocates host memory for fast copies, pinned where the device can; the address is the host's. Not in a recording. */
int leasehold_buffer_alloc_pinned(leasehold_stream stream, uint64_t bytes, leasehold_buffer *buffer);

#define LEASEHOLD_BUFFER_WRAPPED 1   /* memory of the caller's */
#define LEASEHOLD_BUFFER_READ_ONLY 2 /* work that writes it is refused */
#define LEASEHOLD_BUFFER_PINNED 4    /* pinned host memory */
#define LEASEHOLD_BUFFER_PAGEABLE 8  /* host memory that is not pinned: of a CPU, or where nothing can be pinned */
#define LEASEHOLD_BUFFER_RECORDED 16 /* of a recording that goes on */

typedef struct leasehold_wrap_desc {
    size_t size;
    uint64_t address; /* on the device */
    uint64_t bytes;
    uint64_t native;           /* 0 on all devices of this library; Metal's buffer, should it have Metal */
    uint32_t flags;            /* 0 or LEASEHOLD_BUFFER_READ_ONLY */
    uint32_t reserved;         /* 0 */
    leasehold_release release; /* may be NULL */
    void *context;
} leasehold_wrap_desc;

/* Makes a buffer of memory of the caller's, which the runtime's device can use at this address. The library does not free, move or reuse
 * it. Its uses are ordered as those of any buffer. Until release is called it must stay, and nobody else may write it, nor read it unless it is
 * read-only. release is called after the last release of the buffer and the end of its last use: then, or in a later call, at the latest in
 * leasehold_runtime_synchronize or leasehold_runtime_close. */
int leasehold_buffer_wrap(leasehold_runtime runtime, const leasehold_wrap_desc *desc, leasehold_buffer *buffer);

int leasehold_buffer_retain(leasehold_buffer buffer);
/* The memory is free for others once the work that uses it is over. */
int leasehold_buffer_release(leasehold_buffer buffer);

typedef struct leasehold_buffer_info {
    size_t size;
    uint64_t address; /* on the device; 0 for an empty buffer, and before a recording ends */
    uint64_t bytes;
    uint64_t native; /* 0 on all devices of this library; Metal's buffer, should it have Metal */
    uint32_t flags;  /* LEASEHOLD_BUFFER_* */
    uint32_t reserved;
} leasehold_buffer_info;

int leasehold_buffer_describe(leasehold_buffer buffer, leasehold_buffer_info *info);

/* Names a buffer in reports and snapshots. */
int leasehold_buffer_set_name(leasehold_buffer buffer, const char *name);

/* ---- operands and transfers ---- */

#define LEASEHOLD_READ 1
#define LEASEHOLD_WRITE 2      /* writes all of it, and reads none of it */
#define LEASEHOLD_READ_WRITE 3 /* 1 | 2 */

#define LEASEHOLD_WHOLE UINT64_MAX /* bytes up to the end of the buffer */

/* A part of a buffer, and what an operation does with it. A part that does not lie in the buffer is LEASEHOLD_INVALID_ARGUMENT. */
typedef struct leasehold_operand {
    leasehold_buffer buffer;
    uint64_t offset; /* in bytes */
    uint64_t bytes;  /* or LEASEHOLD_WHOLE */
    uint32_t access; /* LEASEHOLD_READ, _WRITE or _READ_WRITE; may be 0 for transfers, which know */
    uint32_t reserved;
} leasehold_operand;

/* Copies on the device, or between the stream's device and another one; either side may be pinned host memory. Both have as many bytes, and do
 * not overlap. */
int leasehold_stream_copy(leasehold_stream stream, leasehold_operand to, leasehold_operand from, leasehold_point *point);

typedef struct leasehold_rows {
    uint64_t width; /* bytes of a row */
    uint64_t rows;
    uint64_t to_pitch; /* bytes from one row to the next; at least the width */
    uint64_t from_pitch;
} leasehold_rows;

/* Copies rows of bytes that lie apart. */
int leasehold_stream_copy_rows(leasehold_stream stream, leasehold_operand to, leasehold_operand from, const leasehold_rows *rows,
                               leasehold_point *point);

/* Fills with a number of 1, 2 or 4 bytes (width), again and again. Offset and bytes are multiples of the width. */
int leasehold_stream_fill(leasehold_stream stream, leasehold_operand to, uint32_t value, uint32_t width, leasehold_point *point);

/* Copies host bytes to the device, as many as the operand has. They are taken during the call. In a recording the graph keeps them. */
int leasehold_stream_upload(leasehold_stream stream, leasehold_operand to, const void *from, size_t bytes, leasehold_point *point);
/* The same, and waits for the copy and all earlier work of the stream. */
int leasehold_stream_upload_blocking(leasehold_stream stream, leasehold_operand to, const void *from, size_t bytes);
/* Copies device bytes to the host, as many as the operand has, and waits for them. To read without waiting, copy to a pinned buffer. */
int leasehold_stream_download_blocking(leasehold_stream stream, void *to, size_t bytes, leasehold_operand from);

/* ---- events ---- */

#define LEASEHOLD_EVENT_TIMING 1 /* keeps a time of the device */
#define LEASEHOLD_EVENT_SLEEPS 2 /* a thread that waits for it sleeps at once */

int leasehold_event_create(leasehold_runtime runtime, uint32_t flags, leasehold_event *event);
int leasehold_event_retain(leasehold_event event);
int leasehold_event_release(leasehold_event event);

/* Records an event at a stream's present end; in a recording, at each launch. Whoever waits for an earlier record goes on to. */
int leasehold_event_record(leasehold_event event, leasehold_stream stream, leasehold_point *point);
/* *over: 1 if the last record is over or there is none, else 0. A failure before the record; so for the next. */
int leasehold_event_query(leasehold_event event, int *over);
int leasehold_event_synchronize(leasehold_event event, uint64_t timeout_ns);
/* The device's time from the last record of one event to that of another, both with LEASEHOLD_EVENT_TIMING. Blocks until both are over. */
int leasehold_event_elapsed_blocking(leasehold_event from, leasehold_event to, uint64_t *nanoseconds);
/* The point of the last record. LEASEHOLD_INVALID_STATE if there is none. */
int leasehold_event_point(leasehold_event event, leasehold_point *point);

/* ---- kernels ---- */

#define LEASEHOLD_SOURCE_C_FUNCTION 1 /* runs on the CPU */
#define LEASEHOLD_SOURCE_CUDA_C 2     /* CUDA C++, compiled at run time */
#define LEASEHOLD_SOURCE_PTX 3
#define LEASEHOLD_SOURCE_CUBIN 4 /* machine code, which stays in memory until the process ends */
#define LEASEHOLD_SOURCE_MSL 5   /* the Metal shading language: for the future, since this library has no Metal devices yet */

#define LEASEHOLD_OVERLAP_REFUSED 0  /* no bindings share memory if one of them is written */
#define LEASEHOLD_OVERLAP_IN_PLACE 1 /* two may be the same range */
#define LEASEHOLD_OVERLAP_ANY 2

/* The place of an operand. */
typedef struct leasehold_binding {
    uint64_t address;
    uint64_t bytes;
    uint64_t native; /* 0 on all devices of this library; Metal's buffer, should it have Metal */
    uint32_t access; /* LEASEHOLD_READ, _WRITE or _READ_WRITE */
    uint32_t reserved;
} leasehold_binding;

/* One tile (one block of the grid) of a kernel on the CPU. */
typedef struct leasehold_tile {
    uint32_t tile[3]; /* its number in each direction */
    uint32_t grid[3]; /* tiles in each direction */
    uint32_t threads[3];
    uint32_t shared_bytes;
    void *shared; /* scratch memory of this tile alone, aligned to 64 */
    const leasehold_binding *bindings;
    size_t binding_count;
    const void *params; /* aligned to 1 */
    size_t params_bytes;
} leasehold_tile;

/* A launch that a kernel's check is asked about. */
typedef struct leasehold_launch_info {
    size_t size;
    uint32_t blocks[3]; /* none is zero */
    uint32_t threads[3];
    uint32_t shared_bytes;
    uint32_t binding_count;
    const uint64_t *binding_bytes; /* of each binding */
    const void *params;            /* aligned to 1 */
    size_t params_bytes;
} leasehold_launch_info;

/* The code of a kernel for one backend. Fields that a kind does not name are 0. */
typedef struct leasehold_kernel_source {
    uint32_t kind;       /* LEASEHOLD_SOURCE_* */
    uint32_t capability; /* CUBIN: 90 for compute capability 9.0 */
    void (*function)(const leasehold_tile *tile); /* C_FUNCTION */
    const char *entry;                            /* the function in the code; NULL: the kernel's name */
    const void *code;                             /* text or machine code */
    size_t code_bytes;                            /* 0: the code is a C string */
    const char *const *options;                   /* CUDA_C: options for the compiler */
    size_t option_count;
    const char *ptx; /* CUBIN: PTX for devices that do not run the code; may be NULL */
} leasehold_kernel_source;

/* A tensor map: how the boxes lie that CUDA's TMA copies, from compute capability 9.0 on. It is a part of a launch's parameters, at a
 * multiple of 64 bytes. A launch replaces it by the driver's CUtensorMap of its operand, and so do graphs and their updates; other devices get
 * it as it is. The rules are those of cuTensorMapEncodeTiled, and a launch checks them; the tensor lies in the operand. */
typedef struct leasehold_tensor_map {
    uint64_t sizes[5];   /* elements of each dimension, the innermost first */
    uint64_t strides[4]; /* bytes from an element to the next one, of each dimension but the first */
    uint32_t box[5];     /* elements; 256 at most */
    uint32_t steps[5];   /* from an element that the box takes to the next one; 1 to 8 */
    uint8_t element;     /* LEASEHOLD_MAP_* */
    uint8_t rank;        /* dimensions: 1 to 5 */
    uint8_t interleave;  /* 0; 1 and 2: slices of 16 and 32 bytes */
    uint8_t swizzle;     /* 0; 1 to 3: within 32, 64 and 128 bytes */
    uint8_t l2_promotion; /* 0; 1 to 3: 64, 128 and 256 bytes */
    uint8_t fill_nan;    /* 1: elements out of bounds are not-a-number */
    uint8_t reserved[10];
} leasehold_tensor_map;

enum {
    LEASEHOLD_MAP_U8 = 0,
    LEASEHOLD_MAP_U16 = 1,
    LEASEHOLD_MAP_U32 = 2,
    LEASEHOLD_MAP_I32 = 3,
    LEASEHOLD_MAP_U64 = 4,
    LEASEHOLD_MAP_I64 = 5,
    LEASEHOLD_MAP_F16 = 6,
    LEASEHOLD_MAP_F32 = 7,
    LEASEHOLD_MAP_F64 = 8,
    LEASEHOLD_MAP_BF16 = 9,
    LEASEHOLD_MAP_F32_FTZ = 10,
    LEASEHOLD_MAP_TF32 = 11,
    LEASEHOLD_MAP_TF32_FTZ = 12
};

/* The place of a tensor map in a kernel's parameters. The first parameter of a CUDA function with maps is one, or a struct aligned to 64 bytes. */
typedef struct leasehold_map_place {
    uint32_t binding; /* of which it is the map */
    uint32_t offset;  /* a multiple of 64 */
} leasehold_map_place;

/* The code waits itself for the kernels in front of it in a graph (griddepcontrol.wait, from compute capability 9.0 on), so its blocks may begin
 * while the kernel in front runs. Every block waits, and before that it touches no binding, but for early_reads. Other devices ignore it. */
#define LEASEHOLD_KERNEL_DEPENDENT 1u
/* All blocks of a launch run at the same time, so that they may wait for each other. LEASEHOLD_UNSUPPORTED but with CUDA. A launch of more blocks
 * than leasehold_kernel_resident_blocks is refused. */
#define LEASEHOLD_KERNEL_COOPERATIVE 2u

typedef struct leasehold_kernel_desc {
    size_t size;
    const char *name;
    const leasehold_kernel_source *sources; /* for several backends: a device uses the first that it takes */
    size_t source_count;
    const uint32_t *access; /* LEASEHOLD_READ, _WRITE or _READ_WRITE, for each binding; 30 at most */
    size_t binding_count;
    uint32_t params_bytes; /* 4,096 at most */
    uint32_t alignment;    /* of each binding, a power of two; 0: any */
    uint32_t overlap;      /* LEASEHOLD_OVERLAP_* */
    uint32_t flags;        /* LEASEHOLD_KERNEL_*, or 0 */
    int (*check)(void *context, const leasehold_launch_info *launch); /* 0 accepts a launch; NULL accepts all */
    leasehold_release release;                                        /* may be NULL */
    void *context;
    const leasehold_map_place *maps; /* the tensor maps in the parameters */
    size_t map_count;
    uint32_t cluster[3];  /* blocks of a cluster, of which a grid is made: 8 in all, or 16 where a device has room. Zeros: none. LEASEHOLD_UNSUPPORTED
                             but with CUDA from compute capability 9.0 on */
    uint32_t early_reads; /* of LEASEHOLD_KERNEL_DEPENDENT: bit i for a binding i that the code may read before it waits, if a word behind its parameters
                             says so by the same bit; a graph grants what none of its operations writes, other launches nothing */
} leasehold_kernel_desc;

/* Defines a kernel. Here the caller vouches: for each launch that the check accepts, also in a graph, the code touches its bindings,
 * parameters and shared memory alone, as the accesses say and whatever the bytes are; two tiles share bytes only if both read them or both
 * use atomics. The library checks the rest before it asks: number, access, alignment and overlap of bindings in live memory, the size of
 * the parameters, the device's limits. A C function, its check and its context may be used by several threads at a time. Texts are copied.
 * CUDA C gets the bindings as pointers, then the parameters as one struct. */
int leasehold_kernel_define(const leasehold_kernel_desc *desc, leasehold_kernel *kernel);

/* Compiles a kernel for a device beforehand; else its first launch does. LEASEHOLD_COMPILE with the compiler's text; LEASEHOLD_UNSUPPORTED if
 * the device takes none of the sources. */
int leasehold_kernel_prepare(leasehold_kernel kernel, leasehold_runtime runtime);

/* The blocks of a kernel that a device runs at the same time while nothing else runs, each with so many threads and so many bytes of shared
 * memory beside the kernel's own. Makes the kernel ready as leasehold_kernel_prepare does. LEASEHOLD_UNSUPPORTED but with CUDA. */
int leasehold_kernel_resident_blocks(leasehold_kernel kernel, leasehold_runtime runtime, uint32_t threads, uint32_t shared_bytes, uint64_t *blocks);

int leasehold_kernel_retain(leasehold_kernel kernel);
int leasehold_kernel_release(leasehold_kernel kernel);

typedef struct leasehold_grid {
    uint32_t blocks[3];    /* a zero: the launch does nothing */
    uint32_t threads[3];   /* of a block; 1 at least */
    uint32_t shared_bytes; /* of a block, beside what the kernel declares */
    uint32_t reserved;
} leasehold_grid;

/* Launches a kernel with as many operands and parameters as it declares, in its order, by one submission. */
int leasehold_stream_launch(leasehold_stream stream, leasehold_kernel kernel, const leasehold_grid *grid, const leasehold_operand *operands,
                            size_t operand_count, const void *params, size_t params_bytes, leasehold_point *point);

typedef struct leasehold_launch {
    leasehold_kernel kernel;
    leasehold_grid grid;
    const leasehold_operand *operands;
    size_t operand_count;
    const void *params;
    size_t params_bytes;
} leasehold_launch;

/* Launches kernels one after the other, by one submission: all of them, or after an error none. */
int leasehold_stream_launch_many(leasehold_stream stream, const leasehold_launch *launches, size_t count, leasehold_point *point);

/* ---- calls in stream order ---- */

/* Runs a function on the host; in a recording, at each launch. Another result than 0 fails the stream (LEASEHOLD_FAILED). A function behind a
 * failure is not called. */
int leasehold_stream_host_call(leasehold_stream stream, int (*call)(void *context), leasehold_release release, void *context,
                               leasehold_point *point);

/* Runs a function that enqueues work of its own on the native stream, and touches the operands alone, where the bindings say. It is called once,
 * when the stream comes to submit it, on any thread. In a recording it depends on the device:
 *  - With CUDA it is called when the graph is instantiated, and what it enqueues is captured; a launch does not call it. So it enqueues what a
 *    capture takes and nothing else, and what it does on the host happens once. It is called again only if the graph is instantiated again:
 *    after leasehold_graph_update, or after a graph budget took the idle graph back.
 *  - On the CPU native is 0, and the function does the work itself. It is called at each launch.
 * CUDA's context is current meanwhile. Otherwise as leasehold_stream_host_call. */
int leasehold_stream_foreign_call(leasehold_stream stream, const leasehold_operand *operands, size_t count,
                                  int (*call)(void *context, uintptr_t native, const leasehold_binding *bindings, size_t count),
                                  leasehold_release release, void *context, leasehold_point *point);

/* ---- recordings and graphs ---- */

/* Begins a recording, and gives its stream: what that is given is noted, and not run; all other streams go on. A stream of a recording
 * belongs to the thread that began it: on other threads its calls are LEASEHOLD_INVALID_STATE. What would wait or ask for results is too. */
int leasehold_record_begin(leasehold_runtime runtime, leasehold_stream *stream);

/* Ends the recording and makes a graph of it. The stream is still to be released. On another thread than the recording's it is
 * LEASEHOLD_INVALID_STATE, and the recording goes on. After another failure it is over, and nothing of it is left. */
int leasehold_record_end(leasehold_stream stream, leasehold_graph *graph);

/* Gives the recording up, on any thread. The stream is still to be released. */
int leasehold_record_cancel(leasehold_stream stream);

/* The number of the operation that is recorded next, for leasehold_graph_update. */
int leasehold_record_next(leasehold_stream stream, uint32_t *node);

int leasehold_graph_retain(leasehold_graph graph);
int leasehold_graph_release(leasehold_graph graph);

/* Launches a graph on a stream of its device. Its launches follow one another. */
int leasehold_graph_launch(leasehold_graph graph, leasehold_stream stream, leasehold_point *point);

#define LEASEHOLD_CHANGE_PARAMS 1
#define LEASEHOLD_CHANGE_GRID 2
#define LEASEHOLD_CHANGE_BUFFER 3

typedef struct leasehold_graph_change {
    uint32_t kind;       /* LEASEHOLD_CHANGE_* */
    uint32_t node;       /* PARAMS, GRID: the launch, by leasehold_record_next */
    const void *params;  /* PARAMS */
    size_t params_bytes; /* as many as the kernel declares */
    uint32_t grid[3];    /* GRID: blocks */
    uint32_t reserved;
    leasehold_buffer from; /* BUFFER: wherever the graph uses this buffer, */
    leasehold_buffer to;   /* it uses this one, which is as long at least */
} leasehold_graph_change;

/* Changes a graph for later launches, all or nothing. Launches that are pending stay as they are. *again (or NULL): 1 if the graph had to be
 * instantiated again, else 0. While four launches of it are pending it waits until one is over. */
int leasehold_graph_update(leasehold_graph graph, const leasehold_graph_change *changes, size_t count, int *again);

typedef struct leasehold_graph_info {
    size_t size;
    uint64_t recorded; /* operations */
    uint64_t nodes;    /* operations that a launch runs */
    uint64_t launches; /* so far */
    uint64_t arena_bytes; /* of temporaries, packed by their lifetimes */
    uint64_t exec_bytes;  /* beside that, as far as is known */
} leasehold_graph_info;

int leasehold_graph_describe(leasehold_graph graph, leasehold_graph_info *info);

/* The operations that a launch runs, as JSON: [{"name", "after": [numbers of those that it waits for]}]. Freed by leasehold_text_free. */
int leasehold_graph_nodes(leasehold_graph graph, char **json);

/* ---- host timelines ---- */

/* Makes a timeline that the host signals: a stream may wait for a value of it that nobody has signalled yet. */
int leasehold_host_timeline_create(leasehold_runtime runtime, leasehold_host_timeline *timeline);
int leasehold_host_timeline_retain(leasehold_host_timeline timeline);
/* With the last holder the values that were not signalled fail: nobody could signal them any more. A stream that waits for one fails, and a
 * graph that was recorded with such a wait is refused at its launch. */
int leasehold_host_timeline_release(leasehold_host_timeline timeline);

/* The point after the one that the host timeline stands at. A fresh one stands anywhere. */
int leasehold_host_timeline_next(leasehold_host_timeline timeline, leasehold_point *point);
/* Raises the host timeline to a value: who waits for it or less goes on. LEASEHOLD_INVALID_ARGUMENT unless it grows. */
int leasehold_host_timeline_signal(leasehold_host_timeline timeline, uint64_t value);
/* Fails the host timeline: who waits for a value that was not signalled fails with this text. The first cause stays. */
int leasehold_host_timeline_fail(leasehold_host_timeline timeline, const char *why);

/* ---- traces ---- */

/* Starts a trace of what the device's streams do: operations with their times on the device, submissions, allocations, waits, and the memory.
 * A runtime has one trace at a time (LEASEHOLD_INVALID_STATE), and the handle that started it ends it. Work takes longer meanwhile. Blocks for
 * some tenths of a millisecond. */
int leasehold_trace_start(leasehold_runtime runtime);
/* Ends the trace, and writes its events to a file for ui.perfetto.dev; a NULL path drops them. Blocks until the traced work is over; what is not
 * over in time has no times. After LEASEHOLD_UNAVAILABLE the file could not be written, and another call with another path writes it.
 * A trace that a closed runtime leaves is dropped. */
int leasehold_trace_stop(leasehold_runtime runtime, const char *path, uint64_t timeout_ns);

/* ---- ranks ---- */

typedef uint64_t leasehold_world;
typedef uint64_t leasehold_comm;

/* Ranks are processes with a device each, or threads of one process, that make the same calls in the same order. A call that waits for other
 * ranks has a limit: LEASEHOLD_TIMEOUT and LEASEHOLD_PEER_LOST have texts that name who has not come. On a GPU the library of collectives is
 * NCCL, which is loaded when the first communicator is made. */

/* Opens the world that the environment names, as torchrun, mpirun and Slurm set it; the page of reference about the environment has the
 * variables. Waits for rank 0 for 30 seconds at most. LEASEHOLD_NOT_FOUND without a launcher. */
int leasehold_world_open(leasehold_world *world);

/* Opens worlds for ranks that are threads of this process: `count` handles, in the order of the ranks. */
int leasehold_world_open_threads(uint32_t count, leasehold_world *worlds);

typedef struct leasehold_world_info {
    size_t size;
    uint32_t rank; /* from 0 on */
    uint32_t ranks;
    uint32_t local_rank; /* among those of the host: the number of the device to take */
    uint32_t reserved;
} leasehold_world_info;

int leasehold_world_describe(leasehold_world world, leasehold_world_info *info);

/* The work of each rank: its last calls, and what those wait for. For people. A rank that does not answer within the limit is named. Freed by
 * leasehold_text_free. */
int leasehold_world_report(leasehold_world world, uint64_t timeout_ns, char **text);

int leasehold_world_retain(leasehold_world world);
/* Lets go of a world. A rank that ends without leasehold_world_close is lost to the others. */
int leasehold_world_release(leasehold_world world);
/* Ends this rank in order, once all ranks have come to this call; then as the release. All communicators are to be released before. After
 * LEASEHOLD_TIMEOUT the world is still there. */
int leasehold_world_close(leasehold_world world, uint64_t timeout_ns);

#define LEASEHOLD_COMM_CHECK_EACH 1 /* compares each call before it is submitted, a round trip each: for debugging */
#define LEASEHOLD_COMM_CONCURRENT 2 /* an order of its own: else the calls of all communicators of a device follow one another */
#define LEASEHOLD_COMM_NO_SENDS 4   /* no SEND, RECV and ALL_TO_ALL, for which NCCL would make connections */

typedef struct leasehold_comm_desc {
    size_t size;
    const char *name;    /* in messages; NULL: "comm" */
    uint64_t timeout_ns; /* how long a call waits for other ranks, once this one is ready; 0: five minutes */
    uint32_t flags;      /* LEASEHOLD_COMM_* */
    uint32_t reserved;
} leasehold_comm_desc;

/* Makes a communicator of all ranks of a world, over the device of a runtime. All ranks call it with the same description (NULL: all 0), those
 * of one name in the same order. Blocks until all have. */
int leasehold_comm_create(leasehold_world world, leasehold_runtime runtime, const leasehold_comm_desc *desc, leasehold_comm *comm);

int leasehold_comm_retain(leasehold_comm comm);
int leasehold_comm_release(leasehold_comm comm);

typedef struct leasehold_comm_info {
    size_t size;
    uint32_t rank;
    uint32_t ranks;
    char library[64]; /* with its version */
} leasehold_comm_info;

int leasehold_comm_describe(leasehold_comm comm, leasehold_comm_info *info);

/* *status: LEASEHOLD_OK for a sound communicator, else the status of what ended it, with its text in leasehold_last_error. */
int leasehold_comm_failure(leasehold_comm comm, int *status);

#define LEASEHOLD_NO_COLOR UINT32_MAX /* a rank that is in no part */

/* Makes communicators of parts: one for the ranks of each color, in the order of their keys. All ranks call it. Blocks until all have. *part: 0
 * without a color. */
int leasehold_comm_split(leasehold_comm comm, uint32_t color, int32_t key, leasehold_comm *part);

/* Makes a communicator without some ranks, which may be lost. The others call it, also after a failure. Blocks until all have. */
int leasehold_comm_shrink(leasehold_comm comm, const uint32_t *lost, size_t count, leasehold_comm *rest);

/* Ends a communicator on all ranks, where calls fail from then on: LEASEHOLD_FAILED with this text here, LEASEHOLD_PEER_LOST there. Waits for
 * the library, for five seconds at most. */
int leasehold_comm_abort(leasehold_comm comm, const char *why);

#define LEASEHOLD_ALL_REDUCE 1     /* to: every rank has the reduction of all; from: the elements, or none: those of to */
#define LEASEHOLD_ALL_GATHER 2     /* to: all ranks' elements, in their order; from: this rank's, which may be its part of to */
#define LEASEHOLD_REDUCE_SCATTER 3 /* to: this rank's part of the reduction, which may lie in from; from: as many elements for each rank */
#define LEASEHOLD_BROADCAST 4      /* to: the root's elements, on all ranks; rank: the root */
#define LEASEHOLD_REDUCE 5         /* to: the elements, and on the root their reduction; rank: the root */
#define LEASEHOLD_ALL_TO_ALL 6     /* to: a part from each rank; from: a part for each rank */
#define LEASEHOLD_SEND 7           /* from: the elements; rank: who receives them */
#define LEASEHOLD_RECV 8           /* to: the elements; rank: who sends them */
#define LEASEHOLD_BARRIER 9        /* no memory */

#define LEASEHOLD_I8 1
#define LEASEHOLD_U8 2
#define LEASEHOLD_I16 3
#define LEASEHOLD_U16 4
#define LEASEHOLD_I32 5
#define LEASEHOLD_U32 6
#define LEASEHOLD_I64 7
#define LEASEHOLD_U64 8
#define LEASEHOLD_F16 9
#define LEASEHOLD_BF16 10
#define LEASEHOLD_F32 11
#define LEASEHOLD_F64 12

#define LEASEHOLD_SUM 1
#define LEASEHOLD_PRODUCT 2
#define LEASEHOLD_LEAST 3
#define LEASEHOLD_LARGEST 4
#define LEASEHOLD_AVERAGE 5 /* of floating-point numbers */

/* One call of all ranks. What a call does not have is 0. */
typedef struct leasehold_collective {
    uint32_t call;    /* LEASEHOLD_ALL_REDUCE, … */
    uint32_t element; /* LEASEHOLD_F32, … */
    uint32_t reduce;  /* LEASEHOLD_SUM, … for ALL_REDUCE, REDUCE_SCATTER and REDUCE */
    uint32_t rank;    /* BROADCAST, REDUCE, SEND, RECV */
    leasehold_operand to;
    leasehold_operand from;
} leasehold_collective;

/* Makes calls in the order of a stream of the communicator's device. Several calls are one group: none of them waits for another of them, so
 * two ranks can send to each other. The results are equal to the bit on all ranks, eager and recorded. In a recording leasehold_record_end
 * compares the ranks' calls: LEASEHOLD_MISMATCH with two of them. Eager calls are compared beside the work, and a difference fails the stream.
 * Parts whose lengths do not fit each other, or that overlap, are LEASEHOLD_INVALID_ARGUMENT, and the calls do not count. */
int leasehold_comm_call(leasehold_comm comm, leasehold_stream stream, const leasehold_collective *calls, size_t count, leasehold_point *point);

#ifdef __cplusplus
}
#endif

#endif
