/* The errors of leasehold_runtime.h: each call is wrong, gets its status and a text, and changes nothing. Prints "ok", or what is wrong,
 * with status 1.
 *
 *     runtime_misuse [cpu:0 | sim-cuda:0]
 */
#include "checks.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#define BYTES 4096

static leasehold_device device;
static leasehold_runtime runtime;
static leasehold_stream stream;
static leasehold_buffer buffer, other;
static leasehold_event event;
static leasehold_kernel kernel;
static leasehold_graph graph;
static leasehold_host_timeline timeline;
static atomic_int released, called;
static const leasehold_grid one = {{1, 1, 1}, {1, 1, 1}, 0, 0};

static leasehold_operand part(leasehold_buffer of, uint64_t offset, uint64_t bytes, uint32_t access) {
    leasehold_operand operand = {of, offset, bytes, access, 0};
    return operand;
}

static leasehold_operand whole(leasehold_buffer of) {
    return part(of, 0, LEASEHOLD_WHOLE, 0);
}

static void tile(const leasehold_tile *at) {
    *(uint32_t *)(uintptr_t)at->bindings[0].address = at->grid[0];
}

static const char cuda[] = "extern \"C\" __global__ void mark(unsigned *x) { *x = gridDim.x; }\n";

/* Calls of a check or of a foreign call are refused: they might wait for themselves. */
static void call_inside(void) {
    leasehold_graph_info info = {.size = sizeof info};
    int over;
    if (graph != 0) {
        STATE(leasehold_graph_describe(graph, &info));
        STATE(leasehold_stream_query(stream, &over));
        STATE(leasehold_buffer_release(buffer));
    }
}

static int refuse(void *context, const leasehold_launch_info *launch) {
    (void)context;
    call_inside();
    return launch->blocks[0] > 4 ? 7 : 0;
}

static void release(void *context) {
    (void)context;
    atomic_fetch_add(&released, 1);
}

static int call(void *context) {
    (void)context;
    atomic_fetch_add(&called, 1);
    return 0;
}

static int fail(void *context) {
    (void)context;
    return 3;
}

static int foreign(void *context, uintptr_t native, const leasehold_binding *bindings, size_t count) {
    (void)context, (void)native, (void)bindings, (void)count;
    call_inside();
    atomic_fetch_add(&called, 1);
    return 0;
}

/* The elements of the map that a tile is given. */
static atomic_int seen;

static void see_map(const leasehold_tile *tile) {
    const leasehold_tensor_map *map = tile->params;
    atomic_store(&seen, (int)(map->sizes[0] * map->sizes[1]));
}

static void complete(void *context, int status) {
    *(atomic_int *)context = status;
}

static leasehold_kernel_source sources[2];
static const uint32_t write_only[31] = {LEASEHOLD_WRITE};

static leasehold_kernel_desc described(void) {
    leasehold_kernel_desc desc = {sizeof desc, "mark", sources, 2, write_only, 1, 0, 4, LEASEHOLD_OVERLAP_REFUSED, 0, refuse, release, NULL, NULL, 0, {0, 0, 0}, 0};
    memset(sources, 0, sizeof sources);
    sources[0].kind = LEASEHOLD_SOURCE_C_FUNCTION;
    sources[0].function = tile;
    sources[1].kind = LEASEHOLD_SOURCE_CUDA_C;
    sources[1].code = cuda;
    return desc;
}

/* Every function with a handle that names nothing of its kind. */
static void wrong_handles(uint64_t handle) {
    leasehold_runtime_info runtime_info = {.size = sizeof runtime_info};
    leasehold_buffer_info buffer_info = {.size = sizeof buffer_info};
    leasehold_graph_info graph_info = {.size = sizeof graph_info};
    leasehold_wrap_desc wrap = {sizeof wrap, 4096, 4096, 0, 0, 0, release, NULL};
    leasehold_graph_change change = {LEASEHOLD_CHANGE_BUFFER, 0, NULL, 0, {1, 1, 1}, 0, handle, buffer};
    leasehold_operand operand = part(handle, 0, LEASEHOLD_WHOLE, LEASEHOLD_WRITE);
    leasehold_operand good = part(buffer, 0, LEASEHOLD_WHOLE, LEASEHOLD_WRITE);
    leasehold_launch launches[2] = {{kernel, one, &good, 1, NULL, 0}, {kernel, one, &operand, 1, NULL, 0}};
    leasehold_rows rows = {1, 1, 1, 1};
    leasehold_point point = {handle, 1};
    char bytes[BYTES] = {0}, *text;
    uint64_t made, number, count;
    uint32_t node;
    uintptr_t native;
    size_t which;
    int answer;
    if (handle != device) {
        INVALID(leasehold_runtime_open(handle, &made));
    }
    if (handle != runtime) {
        INVALID(leasehold_runtime_close(handle, 0));
        INVALID(leasehold_runtime_synchronize(handle, 0));
        INVALID(leasehold_runtime_describe(handle, &runtime_info));
        INVALID(leasehold_runtime_stream(handle, &made));
        INVALID(leasehold_trace_start(handle));
        INVALID(leasehold_trace_stop(handle, NULL, 0));
        INVALID(leasehold_wait_all(handle, NULL, 0, 0));
        INVALID(leasehold_wait_any(handle, &point, 1, 0, &which));
        INVALID(leasehold_stream_create(handle, NULL, &made));
        INVALID(leasehold_buffer_wrap(handle, &wrap, &made));
        INVALID(leasehold_event_create(handle, 0, &made));
        INVALID(leasehold_kernel_prepare(kernel, handle));
        INVALID(leasehold_kernel_resident_blocks(kernel, handle, 64, 0, &count));
        INVALID(leasehold_record_begin(handle, &made));
        INVALID(leasehold_host_timeline_create(handle, &made));
    }
    if (handle != stream) {
        INVALID(leasehold_stream_retain(handle));
        INVALID(leasehold_stream_release(handle));
        INVALID(leasehold_stream_native(handle, &native));
        INVALID(leasehold_stream_query(handle, &answer));
        INVALID(leasehold_stream_synchronize(handle, 0));
        INVALID(leasehold_stream_now(handle, &point));
        INVALID(leasehold_stream_wait_point(handle, (leasehold_point){0, 0}));
        INVALID(leasehold_stream_wait_event(handle, event));
        INVALID(leasehold_stream_wait_native(handle, 0));
        INVALID(leasehold_stream_precede_native(handle, 0));
        INVALID(leasehold_stream_flush(handle));
        INVALID(leasehold_stream_failure(handle, &answer));
        INVALID(leasehold_stream_set_name(handle, "name"));
        INVALID(leasehold_stream_on_complete(handle, complete, &called));
        INVALID(leasehold_buffer_alloc(handle, BYTES, &made));
        INVALID(leasehold_buffer_alloc_pinned(handle, BYTES, &made));
        INVALID(leasehold_stream_copy(handle, whole(buffer), whole(other), NULL));
        INVALID(leasehold_stream_copy_rows(handle, whole(buffer), whole(other), &rows, NULL));
        INVALID(leasehold_stream_fill(handle, whole(buffer), 0, 1, NULL));
        INVALID(leasehold_stream_upload(handle, whole(buffer), bytes, BYTES, NULL));
        INVALID(leasehold_stream_upload_blocking(handle, whole(buffer), bytes, BYTES));
        INVALID(leasehold_stream_download_blocking(handle, bytes, BYTES, whole(buffer)));
        INVALID(leasehold_event_record(event, handle, NULL));
        INVALID(leasehold_stream_launch(handle, kernel, &one, &good, 1, NULL, 0, NULL));
        INVALID(leasehold_stream_launch_many(handle, launches, 1, NULL));
        INVALID(leasehold_stream_host_call(handle, call, release, NULL, NULL));
        INVALID(leasehold_stream_foreign_call(handle, &good, 1, foreign, release, NULL, NULL));
        INVALID(leasehold_record_end(handle, &made));
        INVALID(leasehold_record_cancel(handle));
        INVALID(leasehold_record_next(handle, &node));
        INVALID(leasehold_graph_launch(graph, handle, NULL));
    }
    if (handle != buffer) {
        INVALID(leasehold_buffer_retain(handle));
        INVALID(leasehold_buffer_release(handle));
        INVALID(leasehold_buffer_describe(handle, &buffer_info));
        INVALID(leasehold_buffer_set_name(handle, "name"));
        INVALID(leasehold_stream_copy(stream, whole(handle), whole(other), NULL));
        INVALID(leasehold_stream_copy(stream, whole(other), whole(handle), NULL));
        INVALID(leasehold_stream_copy_rows(stream, whole(other), whole(handle), &rows, NULL));
        INVALID(leasehold_stream_fill(stream, whole(handle), 0, 1, NULL));
        INVALID(leasehold_stream_upload(stream, whole(handle), bytes, BYTES, NULL));
        INVALID(leasehold_stream_upload_blocking(stream, whole(handle), bytes, BYTES));
        INVALID(leasehold_stream_download_blocking(stream, bytes, BYTES, whole(handle)));
        INVALID(leasehold_stream_launch(stream, kernel, &one, &operand, 1, NULL, 0, NULL));
        INVALID(leasehold_stream_launch_many(stream, launches, 2, NULL));
        INVALID(leasehold_stream_foreign_call(stream, &operand, 1, foreign, release, NULL, NULL));
        INVALID(leasehold_graph_update(graph, &change, 1, NULL));
    }
    if (handle != event) {
        INVALID(leasehold_event_retain(handle));
        INVALID(leasehold_event_release(handle));
        INVALID(leasehold_event_record(handle, stream, NULL));
        INVALID(leasehold_event_query(handle, &answer));
        INVALID(leasehold_event_synchronize(handle, 0));
        INVALID(leasehold_event_elapsed_blocking(handle, event, &number));
        INVALID(leasehold_event_elapsed_blocking(event, handle, &number));
        INVALID(leasehold_event_point(handle, &point));
        INVALID(leasehold_stream_wait_event(stream, handle));
    }
    if (handle != kernel) {
        launches[1].kernel = handle;
        INVALID(leasehold_kernel_prepare(handle, runtime));
        INVALID(leasehold_kernel_resident_blocks(handle, runtime, 64, 0, &count));
        INVALID(leasehold_kernel_retain(handle));
        INVALID(leasehold_kernel_release(handle));
        INVALID(leasehold_stream_launch(stream, handle, &one, &good, 1, NULL, 0, NULL));
        INVALID(leasehold_stream_launch_many(stream, launches, 2, NULL));
    }
    if (handle != graph) {
        INVALID(leasehold_graph_retain(handle));
        INVALID(leasehold_graph_release(handle));
        INVALID(leasehold_graph_launch(handle, stream, NULL));
        INVALID(leasehold_graph_update(handle, NULL, 0, NULL));
        INVALID(leasehold_graph_describe(handle, &graph_info));
        INVALID(leasehold_graph_nodes(handle, &text));
    }
    if (handle != timeline) {
        INVALID(leasehold_host_timeline_retain(handle));
        INVALID(leasehold_host_timeline_release(handle));
        INVALID(leasehold_host_timeline_next(handle, &point));
        INVALID(leasehold_host_timeline_signal(handle, 1));
        INVALID(leasehold_host_timeline_fail(handle, "why"));
        if (handle > UINT16_MAX) {
            point.timeline = handle;
            point.value = 1;
            INVALID(leasehold_stream_wait_point(stream, point));
            INVALID(leasehold_wait_all(runtime, &point, 1, LEASEHOLD_FOREVER));
        }
    }
}

/* No place for an answer, no struct, a struct without a size. */
static void null_pointers(void) {
    size_t tiny[16] = {8};
    leasehold_point point = {0, 0};
    size_t which;
    INVALID(leasehold_runtime_open(device, NULL));
    INVALID(leasehold_runtime_describe(runtime, NULL));
    INVALID(leasehold_runtime_describe(runtime, (leasehold_runtime_info *)(void *)tiny));
    INVALID(leasehold_runtime_stream(runtime, NULL));
    INVALID(leasehold_wait_all(runtime, NULL, 1, 0));
    INVALID(leasehold_wait_all(runtime, &point, SIZE_MAX, 0));
    INVALID(leasehold_wait_any(runtime, NULL, 1, 0, &which));
    INVALID(leasehold_wait_any(runtime, NULL, 0, 0, &which));
    INVALID(leasehold_wait_any(runtime, &point, 1, 0, NULL));
    INVALID(leasehold_stream_create(runtime, NULL, NULL));
    INVALID(leasehold_stream_create(runtime, (leasehold_stream_options *)(void *)tiny, &stream));
    INVALID(leasehold_stream_native(stream, NULL));
    INVALID(leasehold_stream_query(stream, NULL));
    INVALID(leasehold_stream_now(stream, NULL));
    INVALID(leasehold_stream_failure(stream, NULL));
    INVALID(leasehold_stream_set_name(stream, NULL));
    INVALID(leasehold_stream_set_name(stream, "\xff\xfe"));
    INVALID(leasehold_stream_on_complete(stream, NULL, NULL));
    INVALID(leasehold_buffer_alloc(stream, BYTES, NULL));
    INVALID(leasehold_buffer_alloc_pinned(stream, BYTES, NULL));
    INVALID(leasehold_buffer_wrap(runtime, NULL, &buffer));
    INVALID(leasehold_buffer_describe(buffer, NULL));
    INVALID(leasehold_buffer_set_name(buffer, NULL));
    INVALID(leasehold_stream_copy_rows(stream, whole(buffer), whole(other), NULL, NULL));
    INVALID(leasehold_stream_upload(stream, whole(buffer), NULL, BYTES, NULL));
    INVALID(leasehold_stream_upload(stream, whole(buffer), &point, SIZE_MAX, NULL));
    INVALID(leasehold_stream_upload_blocking(stream, whole(buffer), NULL, BYTES));
    INVALID(leasehold_stream_download_blocking(stream, NULL, BYTES, whole(buffer)));
    INVALID(leasehold_event_create(runtime, 0, NULL));
    INVALID(leasehold_event_create(runtime, 4, &event));
    INVALID(leasehold_event_query(event, NULL));
    INVALID(leasehold_event_point(event, NULL));
    INVALID(leasehold_event_elapsed_blocking(event, event, NULL));
    INVALID(leasehold_kernel_define(NULL, &kernel));
    INVALID(leasehold_stream_launch(stream, kernel, NULL, NULL, 0, NULL, 0, NULL));
    INVALID(leasehold_stream_launch(stream, kernel, &one, NULL, 1, NULL, 0, NULL));
    INVALID(leasehold_stream_launch_many(stream, NULL, 1, NULL));
    INVALID(leasehold_stream_host_call(stream, NULL, release, NULL, NULL));
    INVALID(leasehold_stream_foreign_call(stream, NULL, 0, NULL, release, NULL, NULL));
    INVALID(leasehold_record_begin(runtime, NULL));
    INVALID(leasehold_record_end(stream, NULL));
    STATE(leasehold_trace_stop(runtime, NULL, 0));
    OK(leasehold_trace_start(runtime));
    STATE(leasehold_trace_start(runtime));
    INVALID(leasehold_trace_stop(runtime, "\xff\xfe", 0));
    OK(leasehold_trace_stop(runtime, NULL, 0));
    STATE(leasehold_record_end(stream, &graph));
    STATE(leasehold_record_cancel(stream));
    STATE(leasehold_record_next(stream, &(uint32_t){0}));
    INVALID(leasehold_graph_update(graph, NULL, 1, NULL));
    INVALID(leasehold_graph_describe(graph, NULL));
    INVALID(leasehold_graph_nodes(graph, NULL));
    INVALID(leasehold_host_timeline_create(runtime, NULL));
    INVALID(leasehold_host_timeline_next(timeline, NULL));
    INVALID(leasehold_host_timeline_fail(timeline, NULL));
}

/* What the text of the last error says. */
#define TEXT(part) THAT(strstr(leasehold_last_error(), part) != NULL)

/* Parts outside of buffers, other lengths, overlaps, accesses. */
static void operands(void) {
    static const struct {
        uint64_t offset, bytes;
    } outside[] = {{0, BYTES + 1}, {1, BYTES}, {BYTES + 1, 0}, {BYTES + 1, LEASEHOLD_WHOLE}, {UINT64_MAX, 2}, {2, UINT64_MAX - 1}};
    leasehold_operand two[2];
    leasehold_rows rows = {16, 4, 8, 16};
    char bytes[BYTES];
    size_t i;
    for (i = 0; i < sizeof outside / sizeof *outside; i++) {
        leasehold_operand wrong = part(buffer, outside[i].offset, outside[i].bytes, 0);
        INVALID(leasehold_stream_fill(stream, wrong, 0, 1, NULL));
        INVALID(leasehold_stream_copy(stream, whole(other), wrong, NULL));
        INVALID(leasehold_stream_copy(stream, wrong, whole(other), NULL));
        INVALID(leasehold_stream_download_blocking(stream, bytes, BYTES, wrong));
        wrong.access = LEASEHOLD_WRITE;
        INVALID(leasehold_stream_launch(stream, kernel, &one, &wrong, 1, NULL, 0, NULL));
    }
    INVALID(leasehold_stream_fill(stream, part(buffer, BYTES + 4, LEASEHOLD_WHOLE, 0), 0, 1, NULL));
    TEXT("offset 4100 is beyond a buffer of 4096 bytes");
    INVALID(leasehold_stream_fill(0, whole(buffer), 0, 1, NULL));
    TEXT("no stream was given: the handle is 0");
    INVALID(leasehold_stream_fill(stream, whole(stream), 0, 1, NULL));
    TEXT("(kind: stream) is no buffer that is open");
    INVALID(leasehold_event_record(device, stream, NULL));
    TEXT("(kind: device) is no event that is open");
    INVALID(leasehold_stream_fill(stream, part(buffer, 0, 4, LEASEHOLD_READ), 0, 1, NULL));
    INVALID(leasehold_stream_copy(stream, part(buffer, 0, 4, 0), part(other, 0, 4, LEASEHOLD_WRITE), NULL));
    INVALID(leasehold_stream_copy(stream, part(buffer, 0, 8, 0), part(other, 0, 4, 0), NULL));
    INVALID(leasehold_stream_copy(stream, part(buffer, 0, 8, 0), part(buffer, 4, 8, 0), NULL));
    INVALID(leasehold_stream_copy_rows(stream, whole(buffer), whole(other), &rows, NULL));
    rows.to_pitch = UINT64_MAX;
    INVALID(leasehold_stream_copy_rows(stream, whole(buffer), whole(other), &rows, NULL));
    INVALID(leasehold_stream_fill(stream, part(buffer, 0, 6, 0), 0, 4, NULL));
    INVALID(leasehold_stream_fill(stream, whole(buffer), 0, 3, NULL));
    INVALID(leasehold_stream_fill(stream, whole(buffer), 256, 1, NULL));
    INVALID(leasehold_stream_upload(stream, part(buffer, 0, 8, 0), bytes, 7, NULL));
    INVALID(leasehold_stream_upload_blocking(stream, part(buffer, 0, 8, 0), bytes, 9));
    INVALID(leasehold_stream_download_blocking(stream, bytes, 9, part(buffer, 0, 8, 0)));
    two[0] = part(buffer, 0, 64, 4);
    INVALID(leasehold_stream_launch(stream, kernel, &one, two, 1, NULL, 0, NULL));
    two[0] = part(buffer, 0, 64, LEASEHOLD_READ);
    INVALID(leasehold_stream_launch(stream, kernel, &one, two, 1, NULL, 0, NULL));
    two[0] = part(buffer, 1, 64, LEASEHOLD_WRITE);
    INVALID(leasehold_stream_launch(stream, kernel, &one, two, 1, NULL, 0, NULL));
    two[0] = part(buffer, 0, 64, LEASEHOLD_WRITE);
    two[0].reserved = 1;
    INVALID(leasehold_stream_launch(stream, kernel, &one, two, 1, NULL, 0, NULL));
    two[0].reserved = 0;
    two[1] = two[0];
    INVALID(leasehold_stream_launch(stream, kernel, &one, two, 2, NULL, 0, NULL));
    INVALID(leasehold_stream_launch(stream, kernel, &one, two, 0, NULL, 0, NULL));
    INVALID(leasehold_stream_launch(stream, kernel, &one, two, 1, bytes, 4, NULL));
    INVALID(leasehold_stream_launch(stream, kernel, &(leasehold_grid){{5, 1, 1}, {1, 1, 1}, 0, 0}, two, 1, NULL, 0, NULL));
    INVALID(leasehold_stream_launch(stream, kernel, &(leasehold_grid){{1, 1, 1}, {0, 1, 1}, 0, 0}, two, 1, NULL, 0, NULL));
    INVALID(leasehold_stream_launch(stream, kernel, &(leasehold_grid){{1, 1, 1}, {1 << 20, 1, 1}, 0, 0}, two, 1, NULL, 0, NULL));
    INVALID(leasehold_stream_launch(stream, kernel, &(leasehold_grid){{1, 1, 1}, {1, 1, 1}, UINT32_MAX, 0}, two, 1, NULL, 0, NULL));
    INVALID(leasehold_stream_launch(stream, kernel, &(leasehold_grid){{1, 1, 1}, {1, 1, 1}, 0, 1}, two, 1, NULL, 0, NULL));
    OK(leasehold_stream_launch(stream, kernel, &(leasehold_grid){{0, 1, 1}, {1, 1, 1}, 0, 0}, two, 1, NULL, 0, NULL));
    OK(leasehold_stream_launch(stream, kernel, &one, two, 1, NULL, 0, NULL));
    IS(LEASEHOLD_OUT_OF_MEMORY, leasehold_buffer_alloc(stream, UINT64_MAX, &two[0].buffer));
    THAT(leasehold_buffer_alloc(stream, (uint64_t)1 << 46, &two[0].buffer) != LEASEHOLD_OK);
    THAT(leasehold_buffer_alloc_pinned(stream, (uint64_t)1 << 46, &two[0].buffer) != LEASEHOLD_OK);
}

/* Points that nobody was given: no wait for one hangs. */
static void points(void) {
    leasehold_point now, point;
    uint64_t number;
    size_t which;
    OK(leasehold_stream_now(stream, &now));
    for (number = 0; number <= UINT16_MAX; number++) {
        point.timeline = number;
        point.value = ((uint64_t)1 << 48) - 1;
        INVALID(leasehold_wait_all(runtime, &point, 1, LEASEHOLD_FOREVER));
    }
    for (number = 0; number < 64; number++) {
        point.timeline = now.timeline;
        point.value = now.value + ((uint64_t)1 << number);
        INVALID(leasehold_stream_wait_point(stream, point));
        INVALID(leasehold_wait_any(runtime, &point, 1, LEASEHOLD_FOREVER, &which));
    }
    point = (leasehold_point){0, 1};
    INVALID(leasehold_stream_wait_point(stream, point));
}

/* A tensor map on the device, whose rules hold on every device. */
static void tensor_maps(void) {
    leasehold_map_place place = {0, 0};
    leasehold_tensor_map map = {.sizes = {16, 4}, .strides = {64}, .box = {8, 4}, .steps = {1, 1}, .element = LEASEHOLD_MAP_F32, .rank = 2};
    leasehold_kernel_desc desc = described();
    leasehold_operand operand = part(buffer, 0, 256, LEASEHOLD_WRITE);
    leasehold_kernel mapped = 0;
    desc.params_bytes = sizeof map;
    desc.maps = &place;
    desc.map_count = 1;
    desc.check = NULL;
    sources[0].function = see_map;
    desc.source_count = 1;
    OK(leasehold_kernel_define(&desc, &mapped));
    if (leasehold_kernel_prepare(mapped, runtime) == LEASEHOLD_OK) {
        OK(leasehold_stream_launch(stream, mapped, &one, &operand, 1, &map, sizeof map, NULL));
        OK(leasehold_stream_synchronize(stream, LEASEHOLD_FOREVER));
        THAT(atomic_load(&seen) == 16 * 4);
        map.sizes[1] = 5;
        INVALID(leasehold_stream_launch(stream, mapped, &one, &operand, 1, &map, sizeof map, NULL));
        THAT(strstr(leasehold_last_error(), "takes 320 bytes, and binding 0 has 256") != NULL);
        map.sizes[1] = 4;
        map.box[0] = 3;
        INVALID(leasehold_stream_launch(stream, mapped, &one, &operand, 1, &map, sizeof map, NULL));
        THAT(strstr(leasehold_last_error(), "boxDim") != NULL);
    }
    OK(leasehold_kernel_release(mapped));
}

static leasehold_kernel defined(const char *name, const char *source, uint32_t flags, uint32_t across, uint32_t down) {
    static const uint32_t read_write = LEASEHOLD_READ_WRITE;
    leasehold_kernel_desc desc = described();
    leasehold_kernel made = 0;
    desc.name = name;
    desc.check = NULL;
    desc.flags = flags;
    desc.access = &read_write;
    desc.cluster[0] = across;
    desc.cluster[1] = down;
    desc.cluster[2] = 1;
    sources[1].code = source;
    desc.sources = &sources[source != NULL];
    desc.source_count = 1;
    OK(leasehold_kernel_define(&desc, &made));
    return made;
}

/* Clusters of blocks and cooperative launches, which CUDA has, and the CPU says that it has not. */
static void attributes(int cpu) {
    /* A block writes the row of the other one in its cluster. */
    static const char *const pairs =
        "extern \"C\" __global__ void pairs(unsigned *x) { __shared__ unsigned row; row = blockIdx.y; __cluster_barrier_arrive(); "
        "__cluster_barrier_wait(); x[blockIdx.x + 2 * blockIdx.y] = *(unsigned *)__cluster_map_shared_rank(&row, 1 - "
        "__clusterRelativeBlockRank()); __cluster_barrier_arrive(); __cluster_barrier_wait(); }";
    /* All blocks wait for each other. */
    static const char *const crew =
        "extern \"C\" __global__ void crew(unsigned *x) { atomicAdd(x, 1u); while (*(volatile unsigned *)x % gridDim.x != 0) { } }";
    leasehold_operand operand = part(buffer, 0, 64, LEASEHOLD_READ_WRITE);
    leasehold_grid grid = {{2, 4, 1}, {1, 1, 1}, 0, 0};
    leasehold_kernel made;
    uint64_t count = 0;
    uint32_t i, found[8];
    for (i = 0; i < 2; i++) {
        made = defined("marks", NULL, i == 0 ? 0 : LEASEHOLD_KERNEL_COOPERATIVE, i == 0 ? 2 : 1, 1);
        IS(LEASEHOLD_UNSUPPORTED, leasehold_kernel_prepare(made, runtime));
        IS(LEASEHOLD_UNSUPPORTED, leasehold_stream_launch(stream, made, &grid, &operand, 1, NULL, 0, NULL));
        OK(leasehold_kernel_release(made));
    }
    if (cpu) {
        made = defined("marks", NULL, 0, 1, 1);
        IS(LEASEHOLD_UNSUPPORTED, leasehold_kernel_resident_blocks(made, runtime, 64, 0, &count));
        OK(leasehold_kernel_release(made));
        return;
    }
    made = defined("pairs", pairs, 0, 1, 2);
    if (leasehold_kernel_prepare(made, runtime) == LEASEHOLD_OK) {
        OK(leasehold_stream_launch(stream, made, &grid, &operand, 1, NULL, 0, NULL));
        OK(leasehold_stream_download_blocking(stream, found, sizeof found, part(buffer, 0, sizeof found, LEASEHOLD_READ)));
        for (i = 0; i < 8; i++) THAT(found[i] == (i / 2 ^ 1));
        grid.blocks[1] = 3;
        INVALID(leasehold_stream_launch(stream, made, &grid, &operand, 1, NULL, 0, NULL));
        THAT(strstr(leasehold_last_error(), "is not made of clusters of [1, 2, 1]") != NULL);
    }
    OK(leasehold_kernel_release(made));
    made = defined("crew", crew, LEASEHOLD_KERNEL_COOPERATIVE, 1, 1);
    if (leasehold_kernel_prepare(made, runtime) == LEASEHOLD_OK) {
        INVALID(leasehold_kernel_resident_blocks(made, runtime, 64, 0, NULL));
        OK(leasehold_kernel_resident_blocks(made, runtime, 1, 0, &count));
        THAT(count > 4);
        OK(leasehold_stream_fill(stream, whole(buffer), 0, 1, NULL));
        grid.blocks[0] = 4;
        grid.blocks[1] = 1;
        OK(leasehold_stream_launch(stream, made, &grid, &operand, 1, NULL, 0, NULL));
        OK(leasehold_stream_download_blocking(stream, found, sizeof found, part(buffer, 0, sizeof found, LEASEHOLD_READ)));
        THAT(found[0] == 4);
        grid.blocks[0] = (uint32_t)count + 1;
        INVALID(leasehold_stream_launch(stream, made, &grid, &operand, 1, NULL, 0, NULL));
        THAT(strstr(leasehold_last_error(), "at the same time; give at most as many") != NULL);
    }
    OK(leasehold_kernel_release(made));
}

static void kernels(void) {
    leasehold_kernel_desc desc = described();
    leasehold_kernel made = 0;
    leasehold_operand operand = part(buffer, 0, 64, LEASEHOLD_WRITE);
    int before = released, cpu;
    leasehold_runtime_info info = {.size = sizeof info};
    OK(leasehold_runtime_describe(runtime, &info));
    cpu = strncmp(info.device, "cpu", 3) == 0;
    INVALID(leasehold_kernel_define(&desc, NULL));
    desc.name = NULL;
    INVALID(leasehold_kernel_define(&desc, &made));
    desc.name = "";
    INVALID(leasehold_kernel_define(&desc, &made));
    desc = described();
    desc.source_count = 0;
    INVALID(leasehold_kernel_define(&desc, &made));
    desc = described();
    desc.sources = NULL;
    INVALID(leasehold_kernel_define(&desc, &made));
    desc = described();
    desc.binding_count = 31;
    INVALID(leasehold_kernel_define(&desc, &made));
    desc = described();
    desc.binding_count = 2; /* the second access is 0 */
    INVALID(leasehold_kernel_define(&desc, &made));
    desc = described();
    desc.params_bytes = 4097;
    INVALID(leasehold_kernel_define(&desc, &made));
    desc = described();
    desc.alignment = 3;
    INVALID(leasehold_kernel_define(&desc, &made));
    desc = described();
    desc.overlap = 3;
    INVALID(leasehold_kernel_define(&desc, &made));
    desc = described();
    desc.flags = 4;
    INVALID(leasehold_kernel_define(&desc, &made));
    desc = described();
    desc.cluster[0] = 2; /* of no blocks in the other directions */
    INVALID(leasehold_kernel_define(&desc, &made));
    desc.cluster[1] = 9;
    desc.cluster[2] = 1;
    INVALID(leasehold_kernel_define(&desc, &made));
    desc = described();
    desc.flags = LEASEHOLD_KERNEL_DEPENDENT;
    desc.early_reads = 1; /* which it writes */
    INVALID(leasehold_kernel_define(&desc, &made));
    /* A tensor map of no binding, at no multiple of 64, beyond the parameters, and a list that is not there. */
    for (int i = 0; i < 4; i++) {
        leasehold_map_place places[] = {{1, 0}, {0, 32}, {0, 64}};
        desc = described();
        desc.params_bytes = sizeof(leasehold_tensor_map);
        desc.maps = i < 3 ? &places[i] : NULL;
        desc.map_count = 1;
        INVALID(leasehold_kernel_define(&desc, &made));
    }
    desc = described();
    sources[0].kind = 0;
    INVALID(leasehold_kernel_define(&desc, &made));
    desc = described();
    sources[0].function = NULL;
    INVALID(leasehold_kernel_define(&desc, &made));
    desc = described();
    sources[1].code = NULL;
    INVALID(leasehold_kernel_define(&desc, &made));
    sources[1].code = "\xff\xfe";
    INVALID(leasehold_kernel_define(&desc, &made));
    desc = described();
    sources[1].option_count = 1;
    INVALID(leasehold_kernel_define(&desc, &made));
    desc = described();
    sources[1].kind = LEASEHOLD_SOURCE_CUBIN;
    INVALID(leasehold_kernel_define(&desc, &made));
    /* A failure leaves the context to the caller. */
    THAT(released == before);
    /* Code for another device alone, and code that does not compile. */
    desc = described();
    sources[0].kind = LEASEHOLD_SOURCE_MSL;
    sources[0].code = "kernel void mark() {}";
    desc.source_count = 1;
    OK(leasehold_kernel_define(&desc, &made));
    IS(LEASEHOLD_UNSUPPORTED, leasehold_kernel_prepare(made, runtime));
    THAT(!cpu || strstr(leasehold_last_error(), "the CPU runs C functions (LEASEHOLD_SOURCE_C_FUNCTION), not MSL") != NULL);
    IS(LEASEHOLD_UNSUPPORTED, leasehold_stream_launch(stream, made, &one, &operand, 1, NULL, 0, NULL));
    OK(leasehold_kernel_release(made));
    if (!cpu) {
        desc = described();
        sources[1].code = "extern \"C\" __global__ void mark(unsigned *x) { *x = nobody; }";
        OK(leasehold_kernel_define(&desc, &made));
        IS(LEASEHOLD_COMPILE, leasehold_kernel_prepare(made, runtime));
        THAT(strstr(leasehold_last_error(), "nobody") != NULL);
        OK(leasehold_kernel_release(made));
    }
    desc = described();
    sources[0].kind = LEASEHOLD_SOURCE_PTX;
    sources[0].code = "no PTX at all";
    OK(leasehold_kernel_define(&desc, &made));
    if (cpu) {
        IS(LEASEHOLD_UNSUPPORTED, leasehold_kernel_prepare(made, runtime));
    } else {
        THAT(leasehold_kernel_prepare(made, runtime) != LEASEHOLD_OK);
    }
    OK(leasehold_kernel_release(made));
    attributes(cpu);
}

static void wrap(void) {
    leasehold_wrap_desc desc = {sizeof desc, 0, 64, 0, 0, 0, release, NULL};
    leasehold_buffer made;
    int before = released;
    INVALID(leasehold_buffer_wrap(runtime, &desc, &made));
    desc.address = 4096;
    desc.bytes = 0;
    INVALID(leasehold_buffer_wrap(runtime, &desc, &made));
    desc.bytes = UINT64_MAX;
    INVALID(leasehold_buffer_wrap(runtime, &desc, &made));
    desc.bytes = 64;
    desc.flags = LEASEHOLD_BUFFER_PINNED;
    INVALID(leasehold_buffer_wrap(runtime, &desc, &made));
    desc.flags = 0;
    INVALID(leasehold_buffer_wrap(runtime, &desc, NULL));
    THAT(released == before);
    /* A struct of an older header ends before the function. */
    desc.size = offsetof(leasehold_wrap_desc, release);
    OK(leasehold_buffer_wrap(runtime, &desc, &made));
    OK(leasehold_buffer_release(made));
    THAT(released == before);
}

static leasehold_stream recorded;

static void *elsewhere(void *argument) {
    leasehold_graph made;
    leasehold_buffer temporary;
    (void)argument;
    STATE(leasehold_stream_fill(recorded, whole(buffer), 0, 1, NULL));
    STATE(leasehold_buffer_alloc(recorded, 64, &temporary));
    STATE(leasehold_record_end(recorded, &made));
    return NULL;
}

static void *cancel(void *argument) {
    (void)argument;
    OK(leasehold_record_cancel(recorded));
    return NULL;
}

static void *drop_it(void *argument) {
    (void)argument;
    OK(leasehold_stream_release(recorded));
    return NULL;
}

static void recordings(void) {
    leasehold_point now;
    leasehold_graph made;
    leasehold_buffer temporary;
    pthread_t thread;
    char bytes[64];
    int answer, before = released;
    OK(leasehold_stream_now(stream, &now));
    OK(leasehold_record_begin(runtime, &recorded));
    OK(leasehold_buffer_alloc(recorded, 64, &temporary));
    /* Waits and queries have no meaning there. */
    STATE(leasehold_stream_synchronize(recorded, LEASEHOLD_FOREVER));
    STATE(leasehold_stream_query(recorded, &answer));
    STATE(leasehold_stream_wait_native(recorded, 0));
    STATE(leasehold_stream_precede_native(recorded, 0));
    STATE(leasehold_stream_download_blocking(recorded, bytes, 64, whole(temporary)));
    STATE(leasehold_stream_upload_blocking(recorded, whole(temporary), bytes, 64));
    STATE(leasehold_buffer_alloc_pinned(recorded, 64, &temporary));
    STATE(leasehold_stream_download_blocking(stream, bytes, 64, whole(temporary)));
    answer = 0;
    {
        atomic_int status = -1;
        OK(leasehold_stream_on_complete(recorded, complete, &status));
        THAT(status == LEASEHOLD_INVALID_STATE);
    }
    OK(leasehold_stream_wait_point(recorded, now));
    OK(leasehold_stream_host_call(recorded, call, release, NULL, NULL));
    pthread_create(&thread, NULL, elsewhere, NULL);
    pthread_join(thread, NULL);
    OK(leasehold_stream_fill(recorded, whole(temporary), 1, 1, NULL));
    OK(leasehold_record_end(recorded, &made));
    STATE(leasehold_record_end(recorded, &made));
    STATE(leasehold_stream_fill(recorded, whole(buffer), 0, 1, NULL));
    INVALID(leasehold_graph_launch(made, made, NULL));
    OK(leasehold_stream_release(recorded));
    INVALID(leasehold_stream_release(recorded));
    OK(leasehold_buffer_release(temporary));
    OK(leasehold_graph_release(made));
    INVALID(leasehold_graph_launch(made, stream, NULL));
    THAT(released == before + 1);
    /* Given up, and dropped, by another thread. */
    OK(leasehold_record_begin(runtime, &recorded));
    OK(leasehold_stream_host_call(recorded, call, release, NULL, NULL));
    pthread_create(&thread, NULL, cancel, NULL);
    pthread_join(thread, NULL);
    THAT(released == before + 2);
    STATE(leasehold_record_end(recorded, &made));
    OK(leasehold_stream_release(recorded));
    OK(leasehold_record_begin(runtime, &recorded));
    OK(leasehold_stream_host_call(recorded, call, release, NULL, NULL));
    pthread_create(&thread, NULL, drop_it, NULL);
    pthread_join(thread, NULL);
    THAT(released == before + 3);
}

static void graphs(void) {
    leasehold_graph_change change = {LEASEHOLD_CHANGE_GRID, 0, NULL, 0, {5, 1, 1}, 0, 0, 0};
    leasehold_buffer small;
    INVALID(leasehold_graph_update(graph, &change, 1, NULL)); /* the check refuses it */
    change.node = 1000;
    INVALID(leasehold_graph_update(graph, &change, 1, NULL));
    change.kind = 9;
    INVALID(leasehold_graph_update(graph, &change, 1, NULL));
    change.kind = LEASEHOLD_CHANGE_PARAMS;
    change.node = 0;
    change.params = &change;
    change.params_bytes = 8;
    INVALID(leasehold_graph_update(graph, &change, 1, NULL));
    OK(leasehold_buffer_alloc(stream, 16, &small));
    change.kind = LEASEHOLD_CHANGE_BUFFER;
    change.from = buffer;
    change.to = small;
    INVALID(leasehold_graph_update(graph, &change, 1, NULL));
    change.from = small;
    change.to = buffer;
    INVALID(leasehold_graph_update(graph, &change, 1, NULL));
    OK(leasehold_buffer_release(small));
    OK(leasehold_graph_launch(graph, stream, NULL));
}

static leasehold_stream own;

static int waits_for_itself(void *context) {
    *(atomic_int *)context = leasehold_stream_synchronize(own, LEASEHOLD_FOREVER);
    return 0;
}

static int calls_back(void *context) {
    leasehold_buffer made;
    leasehold_point point;
    THAT(leasehold_buffer_alloc(own, 64, &made) == LEASEHOLD_OK);
    THAT(leasehold_stream_fill(own, whole(made), 1, 1, &point) == LEASEHOLD_OK);
    THAT(leasehold_buffer_release(made) == LEASEHOLD_OK);
    *(atomic_int *)context = 1;
    return 0;
}

/* Calls that fail, that wait for themselves, and that call back. */
static void calls(void) {
    leasehold_runtime_info info = {.size = sizeof info};
    leasehold_operand operand = part(buffer, 0, 64, LEASEHOLD_READ);
    atomic_int inside = -1, status = -1;
    leasehold_buffer made;
    int found, before = released;
    OK(leasehold_runtime_describe(runtime, &info));
    if (info.features & LEASEHOLD_FEATURE_FOREIGN_CALLS) {
        called = 0;
        OK(leasehold_stream_foreign_call(stream, &operand, 1, foreign, NULL, NULL, NULL));
        OK(leasehold_stream_synchronize(stream, 30 * SECONDS));
        THAT(called == 1);
    }
    OK(leasehold_stream_create(runtime, NULL, &own));
    OK(leasehold_stream_host_call(own, waits_for_itself, NULL, &inside, NULL));
    OK(leasehold_stream_synchronize(own, 30 * SECONDS));
    THAT(inside == LEASEHOLD_INVALID_STATE);
    inside = -1;
    OK(leasehold_stream_host_call(own, calls_back, NULL, &inside, NULL));
    OK(leasehold_stream_synchronize(own, 30 * SECONDS));
    THAT(inside == 1);
    OK(leasehold_buffer_alloc(own, 64, &made));
    OK(leasehold_stream_host_call(own, fail, release, NULL, NULL));
    IS(LEASEHOLD_FAILED, leasehold_stream_synchronize(own, 30 * SECONDS));
    THAT(strstr(leasehold_last_error(), "returned 3") != NULL);
    IS(LEASEHOLD_FAILED, leasehold_stream_fill(own, whole(made), 0, 1, NULL));
    IS(LEASEHOLD_FAILED, leasehold_stream_host_call(own, call, release, NULL, NULL));
    OK(leasehold_stream_failure(own, &found));
    THAT(found == LEASEHOLD_FAILED);
    OK(leasehold_stream_on_complete(own, complete, &status));
    THAT(status == LEASEHOLD_FAILED);
    OK(leasehold_buffer_release(made));
    OK(leasehold_stream_release(own));
    while (released != before + 1) {
    }
}

static void timelines(void) {
    leasehold_host_timeline made;
    leasehold_stream waits;
    leasehold_point point;
    int status;
    INVALID(leasehold_host_timeline_signal(timeline, 0));
    OK(leasehold_host_timeline_create(runtime, &made));
    OK(leasehold_host_timeline_next(made, &point));
    OK(leasehold_host_timeline_signal(made, point.value));
    INVALID(leasehold_host_timeline_signal(made, point.value));
    OK(leasehold_host_timeline_next(made, &point));
    OK(leasehold_stream_create(runtime, NULL, &waits));
    OK(leasehold_stream_wait_point(waits, point));
    /* Work that is held back for the host leads no stream of the driver. */
    IS(LEASEHOLD_UNSUPPORTED, leasehold_stream_precede_native(waits, 0));
    /* Nobody can signal it any more. */
    OK(leasehold_host_timeline_release(made));
    INVALID(leasehold_stream_wait_point(stream, point));
    THAT(leasehold_stream_synchronize(waits, 30 * SECONDS) != LEASEHOLD_OK);
    OK(leasehold_stream_failure(waits, &status));
    THAT(status != LEASEHOLD_OK && status != LEASEHOLD_INTERNAL);
    OK(leasehold_stream_release(waits));
}

static void structs_of_other_headers(void) {
    struct {
        leasehold_buffer_info known;
        uint64_t more[4];
    } longer;
    leasehold_buffer_info shorter;
    memset(&longer, 0x77, sizeof longer);
    longer.known.size = sizeof longer;
    OK(leasehold_buffer_describe(buffer, &longer.known));
    THAT(longer.known.bytes == BYTES && longer.known.size == sizeof longer && longer.more[0] == 0x7777777777777777u);
    memset(&shorter, 0x77, sizeof shorter);
    shorter.size = offsetof(leasehold_buffer_info, bytes);
    OK(leasehold_buffer_describe(buffer, &shorter));
    THAT(shorter.address != 0 && shorter.bytes == 0x7777777777777777u);
}

/* Too much is out of memory at once. The work that is pending waits for this very thread, and could not make it fit. */
static void too_much(void) {
    const size_t most = (size_t)1 << 40;
    time_t begin = time(NULL);
    leasehold_host_timeline gate;
    leasehold_point go;
    leasehold_stream busy;
    leasehold_buffer used, none = 7;
    void *block = NULL;
    OK(leasehold_host_timeline_create(runtime, &gate));
    OK(leasehold_host_timeline_next(gate, &go));
    OK(leasehold_stream_create(runtime, NULL, &busy));
    OK(leasehold_buffer_alloc(busy, BYTES, &used));
    OK(leasehold_stream_wait_point(busy, go));
    OK(leasehold_stream_fill(busy, whole(used), 1, 1, NULL));
    OK(leasehold_buffer_release(used));
    IS(LEASEHOLD_OUT_OF_MEMORY, leasehold_buffer_alloc(stream, most, &none));
    THAT(none == 7 && strstr(leasehold_last_error(), "1.00 TiB requested from ") != NULL);
    THAT(strstr(leasehold_last_error(), "; the device has no more: free something, ask for less") != NULL);
    THAT(strstr(leasehold_last_error(), " in all: split it, or use a larger device") != NULL);
    IS(LEASEHOLD_OUT_OF_MEMORY, leasehold_malloc(device, most, 0, &block));
    THAT(block == NULL && strstr(leasehold_last_error(), "free something, ask for less") != NULL);
    THAT(time(NULL) - begin < 20);
    OK(leasehold_host_timeline_signal(gate, go.value));
    OK(leasehold_stream_synchronize(busy, LEASEHOLD_FOREVER));
    OK(leasehold_stream_release(busy));
    OK(leasehold_host_timeline_release(gate));
}

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "cpu:0";
    leasehold_kernel_desc desc;
    leasehold_operand operand;
    leasehold_stream recording;
    uint64_t all[8], stale;
    int i, bit;
    OK(leasehold_device_open(name, NULL, &device));
    /* A backend that this library does not have. The text names what C has. */
    THAT(leasehold_device_open("sim:0", NULL, &all[0]) != LEASEHOLD_OK);
    THAT(strstr(leasehold_last_error(), "::") == NULL);
    OK(leasehold_runtime_open(device, &runtime));
    OK(leasehold_runtime_stream(runtime, &stream));
    OK(leasehold_buffer_alloc(stream, BYTES, &buffer));
    OK(leasehold_buffer_alloc(stream, BYTES, &other));
    OK(leasehold_stream_fill(stream, whole(buffer), 1, 1, NULL));
    OK(leasehold_stream_fill(stream, whole(other), 2, 1, NULL));
    OK(leasehold_event_create(runtime, LEASEHOLD_EVENT_TIMING, &event));
    OK(leasehold_event_record(event, stream, NULL));
    desc = described();
    OK(leasehold_kernel_define(&desc, &kernel));
    OK(leasehold_record_begin(runtime, &recording));
    operand = part(buffer, 0, 64, LEASEHOLD_WRITE);
    OK(leasehold_stream_launch(recording, kernel, &one, &operand, 1, NULL, 0, NULL));
    OK(leasehold_record_end(recording, &graph));
    OK(leasehold_stream_release(recording));
    OK(leasehold_host_timeline_create(runtime, &timeline));
    all[0] = device;
    all[1] = runtime;
    all[2] = stream;
    all[3] = buffer;
    all[4] = event;
    all[5] = kernel;
    all[6] = graph;
    all[7] = timeline;
    wrong_handles(0);
    wrong_handles(UINT64_MAX);
    wrong_handles(recording);
    for (i = 0; i < 8; i++) {
        wrong_handles(all[i]);
        for (bit = 0; bit < 64; bit += 7) {
            stale = all[i] ^ (uint64_t)1 << bit;
            if (stale != other) {
                wrong_handles(stale);
            }
        }
    }
    null_pointers();
    operands();
    points();
    kernels();
    tensor_maps();
    wrap();
    recordings();
    graphs();
    calls();
    timelines();
    too_much();
    structs_of_other_headers();
    OK(leasehold_runtime_synchronize(runtime, LEASEHOLD_FOREVER));
    /* Objects outlive their runtime's handle; the device stays open for the runtime alone. */
    IS(LEASEHOLD_IN_USE, leasehold_device_close(device));
    OK(leasehold_runtime_close(runtime, LEASEHOLD_FOREVER));
    INVALID(leasehold_runtime_close(runtime, LEASEHOLD_FOREVER));
    OK(leasehold_device_close(device));
    INVALID(leasehold_runtime_open(device, &runtime));
    OK(leasehold_stream_fill(stream, whole(buffer), 1, 1, NULL));
    OK(leasehold_graph_launch(graph, stream, NULL));
    OK(leasehold_stream_synchronize(stream, LEASEHOLD_FOREVER));
    OK(leasehold_host_timeline_release(timeline));
    OK(leasehold_graph_release(graph));
    OK(leasehold_kernel_release(kernel));
    OK(leasehold_event_release(event));
    OK(leasehold_buffer_release(other));
    OK(leasehold_buffer_release(buffer));
    OK(leasehold_stream_release(stream));
    INVALID(leasehold_stream_release(stream));
#ifdef LEASEHOLD_SIM
    if (strncmp(name, "sim-", 4) == 0) {
        char *races;
        OK(leasehold_sim_races(&races));
        THAT(*races == '\0');
        leasehold_text_free(races);
    }
#endif
    printf("ok\n");
    return 0;
}
