/* The functions of leasehold_runtime.h, used rightly, on the CPU or a simulated CUDA device. Prints "ok", or what is wrong, with status 1.
 *
 *     runtime [cpu:0 | sim-cuda:0]
 */
#include "checks.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#define COUNT 1000
#define TILE 100
#define BYTES (COUNT * sizeof(float))

static leasehold_device device;
static leasehold_runtime runtime;
static leasehold_stream stream;

static leasehold_operand part(leasehold_buffer buffer, uint64_t offset, uint64_t bytes, uint32_t access) {
    leasehold_operand operand = {buffer, offset, bytes, access, 0};
    return operand;
}

static leasehold_operand whole(leasehold_buffer buffer, uint32_t access) {
    return part(buffer, 0, LEASEHOLD_WHOLE, access);
}

static leasehold_buffer alloc(leasehold_stream on, uint64_t bytes) {
    leasehold_buffer buffer = 0;
    OK(leasehold_buffer_alloc(on, bytes, &buffer));
    THAT(buffer != 0);
    return buffer;
}

static void read_floats(leasehold_buffer buffer, float *to) {
    OK(leasehold_stream_download_blocking(stream, to, BYTES, whole(buffer, LEASEHOLD_READ)));
}

static int all_are(leasehold_buffer buffer, float value) {
    float values[COUNT];
    int i;
    read_floats(buffer, values);
    for (i = 0; i < COUNT && values[i] == value; i++) {
    }
    return i == COUNT;
}

/* ---- a kernel for the CPU and for CUDA: y = a * x + b * y ---- */

typedef struct {
    float a, b;
    uint32_t n;
} scales;

static void axpby(const leasehold_tile *tile) {
    const float *x = (const float *)(uintptr_t)tile->bindings[0].address;
    float *y = (float *)(uintptr_t)tile->bindings[1].address;
    scales p;
    uint32_t i = tile->tile[0] * TILE, end;
    memcpy(&p, tile->params, sizeof p);
    end = i + TILE < p.n ? i + TILE : p.n;
    for (; i < end; i++) {
        y[i] = p.a * x[i] + p.b * y[i];
    }
}

static const char cuda[] = "struct Scales { float a, b; unsigned n; };\n"
                           "extern \"C\" __global__ void axpby(const float *x, float *y, Scales p) {\n"
                           "    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;\n"
                           "    if (i < p.n) y[i] = p.a * x[i] + p.b * y[i];\n"
                           "}\n";

static atomic_int checked, released, called, completed;

static int check(void *context, const leasehold_launch_info *launch) {
    scales p;
    THAT(context == (void *)&checked && launch->size == sizeof *launch);
    THAT(launch->binding_count == 2 && launch->params_bytes == sizeof p);
    atomic_fetch_add(&checked, 1);
    memcpy(&p, launch->params, sizeof p);
    if (launch->blocks[1] != 1 || launch->blocks[2] != 1) {
        return 1;
    }
    return launch->binding_bytes[0] < p.n * sizeof(float) || launch->binding_bytes[1] < p.n * sizeof(float);
}

static void release(void *context) {
    (void)context;
    atomic_fetch_add(&released, 1);
}

static leasehold_kernel define(void) {
    static const uint32_t access[] = {LEASEHOLD_READ, LEASEHOLD_READ_WRITE};
    leasehold_kernel_source sources[2] = {{0}, {0}};
    leasehold_kernel_desc desc = {sizeof desc, "axpby", sources, 2, access, 2, sizeof(scales), 4, LEASEHOLD_OVERLAP_REFUSED, 0, check, release,
                                  (void *)&checked, NULL, 0, {0, 0, 0}, 0};
    leasehold_kernel kernel = 0;
    sources[0].kind = LEASEHOLD_SOURCE_C_FUNCTION;
    sources[0].function = axpby;
    sources[1].kind = LEASEHOLD_SOURCE_CUDA_C;
    sources[1].code = cuda;
    OK(leasehold_kernel_define(&desc, &kernel));
    return kernel;
}

static const leasehold_grid grid = {{(COUNT + TILE - 1) / TILE, 1, 1}, {TILE, 1, 1}, 0, 0};

static void launch(leasehold_stream on, leasehold_kernel kernel, leasehold_buffer x, leasehold_buffer y, float a, float b,
                   leasehold_point *point) {
    scales p;
    leasehold_operand operands[2] = {whole(x, LEASEHOLD_READ), whole(y, LEASEHOLD_READ_WRITE)};
    p.a = a;
    p.b = b;
    p.n = COUNT;
    OK(leasehold_stream_launch(on, kernel, &grid, operands, 2, &p, sizeof p, point));
}

/* ---- the groups ---- */

static void runtimes(const char *name) {
    leasehold_runtime_info info;
    leasehold_runtime other;
    info.size = sizeof info;
    OK(leasehold_runtime_describe(runtime, &info));
    THAT(strcmp(info.device, strncmp(name, "sim-", 4) == 0 ? name + 4 : name) == 0);
    THAT((info.features & LEASEHOLD_FEATURE_GRAPHS) && info.block_threads > 0);
    OK(leasehold_runtime_open(device, &other));
    THAT(other != runtime);
    OK(leasehold_runtime_synchronize(other, LEASEHOLD_FOREVER));
    THAT(leasehold_device_close(device) == LEASEHOLD_IN_USE);
    OK(leasehold_runtime_close(other, 10 * SECONDS));
}

static void buffers(void) {
    static float memory[COUNT] __attribute__((aligned(64)));
    leasehold_buffer_info info;
    leasehold_buffer buffer = alloc(stream, BYTES), empty = alloc(stream, 0), pinned;
    float *at;
    int i;
    info.size = sizeof info;
    OK(leasehold_buffer_set_name(buffer, "a name"));
    OK(leasehold_buffer_describe(buffer, &info));
    THAT(info.bytes == BYTES && info.address % 256 == 0 && info.address != 0);
    OK(leasehold_buffer_describe(empty, &info));
    THAT(info.bytes == 0 && info.address == 0);
    OK(leasehold_buffer_retain(buffer));
    OK(leasehold_buffer_release(buffer));
    OK(leasehold_buffer_describe(buffer, &info));
    OK(leasehold_buffer_alloc_pinned(stream, BYTES, &pinned));
    OK(leasehold_buffer_describe(pinned, &info));
    THAT(info.flags & (LEASEHOLD_BUFFER_PINNED | LEASEHOLD_BUFFER_PAGEABLE));
    at = (float *)(uintptr_t)info.address;
    for (i = 0; i < COUNT; i++) {
        at[i] = 2.0f;
    }
    OK(leasehold_stream_copy(stream, whole(buffer, 0), whole(pinned, 0), NULL));
    THAT(all_are(buffer, 2.0f));
    OK(leasehold_runtime_describe(runtime, &(leasehold_runtime_info){.size = sizeof(leasehold_runtime_info)}));
    OK(leasehold_runtime_synchronize(runtime, LEASEHOLD_FOREVER));
    /* Host memory is the device's on a CPU alone. */
    OK(leasehold_buffer_describe(buffer, &info));
    if (info.flags & LEASEHOLD_BUFFER_PAGEABLE) {
        leasehold_wrap_desc desc = {sizeof desc, (uintptr_t)memory, BYTES, 0, 0, 0, release, NULL};
        leasehold_buffer wrapped, read_only;
        int before = released;
        OK(leasehold_buffer_wrap(runtime, &desc, &wrapped));
        OK(leasehold_buffer_describe(wrapped, &info));
        THAT(info.flags & LEASEHOLD_BUFFER_WRAPPED && info.address == (uintptr_t)memory);
        OK(leasehold_stream_copy(stream, whole(wrapped, LEASEHOLD_WRITE), whole(buffer, LEASEHOLD_READ), NULL));
        OK(leasehold_buffer_release(wrapped));
        OK(leasehold_runtime_synchronize(runtime, LEASEHOLD_FOREVER));
        THAT(released == before + 1 && memory[0] == 2.0f && memory[COUNT - 1] == 2.0f);
        desc.flags = LEASEHOLD_BUFFER_READ_ONLY;
        OK(leasehold_buffer_wrap(runtime, &desc, &read_only));
        THAT(leasehold_stream_fill(stream, whole(read_only, 0), 0, 1, NULL) == LEASEHOLD_INVALID_ARGUMENT);
        OK(leasehold_stream_copy(stream, whole(buffer, 0), whole(read_only, 0), NULL));
        OK(leasehold_buffer_release(read_only));
        OK(leasehold_runtime_synchronize(runtime, LEASEHOLD_FOREVER));
        THAT(released == before + 2);
    }
    OK(leasehold_buffer_release(pinned));
    OK(leasehold_buffer_release(empty));
    OK(leasehold_buffer_release(buffer));
}

static void transfers(void) {
    leasehold_buffer a = alloc(stream, BYTES), b = alloc(stream, BYTES);
    float values[COUNT], back[COUNT];
    leasehold_point point;
    leasehold_rows rows = {8, 10, 16, 8};
    uint64_t pairs[COUNT / 2];
    int i;
    for (i = 0; i < COUNT; i++) {
        values[i] = (float)i;
    }
    OK(leasehold_stream_upload(stream, whole(a, LEASEHOLD_WRITE), values, BYTES, &point));
    THAT(point.timeline != 0);
    memset(values, 0, sizeof values);
    OK(leasehold_stream_copy(stream, whole(b, LEASEHOLD_WRITE), whole(a, LEASEHOLD_READ), &point));
    OK(leasehold_wait_all(runtime, &point, 1, LEASEHOLD_FOREVER));
    read_floats(b, back);
    for (i = 0; i < COUNT; i++) {
        THAT(back[i] == (float)i);
    }
    OK(leasehold_stream_fill(stream, whole(b, 0), 0, 4, NULL));
    OK(leasehold_stream_copy_rows(stream, part(b, 0, 160, 0), part(a, 0, 80, 0), &rows, &point));
    OK(leasehold_stream_download_blocking(stream, pairs, 160, part(b, 0, 160, 0)));
    for (i = 0; i < 20; i++) {
        float expected[2] = {i % 2 == 0 ? (float)i : 0.0f, i % 2 == 0 ? (float)i + 1 : 0.0f};
        THAT(memcmp(&pairs[i], expected, 8) == 0);
    }
    OK(leasehold_stream_fill(stream, whole(b, 0), 0x3f80, 2, NULL));
    OK(leasehold_stream_fill(stream, part(b, 0, 8, 0), 0x41, 1, NULL));
    OK(leasehold_stream_upload_blocking(stream, part(b, 0, 8, 0), values, 8));
    read_floats(b, back);
    THAT(back[0] == 0.0f && back[1] == 0.0f && back[2] != 0.0f);
    OK(leasehold_buffer_release(a));
    OK(leasehold_buffer_release(b));
}

static void completion(void *context, int status) {
    THAT(context == (void *)&completed && status == LEASEHOLD_OK);
    atomic_fetch_add(&completed, 1);
}

static void streams(void) {
    leasehold_stream_options options = {sizeof options, "second", 1, 0};
    leasehold_stream second, third;
    leasehold_buffer a, b;
    leasehold_point point;
    uintptr_t native;
    int over, status = -1;
    OK(leasehold_stream_create(runtime, &options, &second));
    OK(leasehold_stream_create(runtime, NULL, &third));
    OK(leasehold_stream_set_name(third, "third"));
    OK(leasehold_stream_retain(second));
    OK(leasehold_stream_release(second));
    OK(leasehold_stream_native(second, &native));
    a = alloc(second, BYTES);
    b = alloc(third, BYTES);
    /* The order between streams comes from the operands. */
    OK(leasehold_stream_fill(second, whole(a, 0), 0x40000000, 4, NULL));
    OK(leasehold_stream_copy(third, whole(b, 0), whole(a, 0), &point));
    THAT(all_are(b, 2.0f));
    OK(leasehold_stream_wait_point(second, point));
    OK(leasehold_stream_wait_point(second, (leasehold_point){0, 0}));
    OK(leasehold_stream_flush(second));
    OK(leasehold_stream_on_complete(third, completion, (void *)&completed));
    OK(leasehold_stream_synchronize(third, LEASEHOLD_FOREVER));
    OK(leasehold_stream_synchronize(second, 10 * SECONDS));
    OK(leasehold_stream_query(second, &over));
    THAT(over == 1 && completed == 1);
    OK(leasehold_stream_now(second, &point));
    OK(leasehold_stream_failure(second, &status));
    THAT(status == LEASEHOLD_OK);
    OK(leasehold_buffer_release(a));
    OK(leasehold_buffer_release(b));
    OK(leasehold_stream_release(second));
    OK(leasehold_stream_release(third));
}

/* Streams of another library: here, of the simulated driver by hand. Its race detector sees the order. */
static void natives(const char *name) {
    leasehold_buffer a = alloc(stream, BYTES);
    uintptr_t native = 0;
    OK(leasehold_stream_fill(stream, whole(a, 0), 1, 1, NULL));
    if (strncmp(name, "cpu", 3) == 0) {
        OK(leasehold_stream_wait_native(stream, native));
        THAT(leasehold_stream_precede_native(stream, native) == LEASEHOLD_UNSUPPORTED);
    }
#ifdef LEASEHOLD_SIM
    if (strncmp(name, "sim-", 4) == 0) {
        leasehold_buffer_info info;
        uint8_t bytes[BYTES], back[BYTES];
        info.size = sizeof info;
        OK(leasehold_buffer_describe(a, &info));
        OK(leasehold_sim_stream(device, 0, &native));
        OK(leasehold_stream_precede_native(stream, native));
        OK(leasehold_sim_read(device, native, bytes, (void *)(uintptr_t)info.address, BYTES));
        OK(leasehold_sim_fill(device, native, (void *)(uintptr_t)info.address, 2, BYTES));
        OK(leasehold_stream_wait_native(stream, native));
        OK(leasehold_stream_download_blocking(stream, back, BYTES, whole(a, LEASEHOLD_READ)));
        THAT(bytes[0] == 1 && bytes[BYTES - 1] == 1 && back[0] == 2 && back[BYTES - 1] == 2);
        OK(leasehold_stream_end(device, native));
        OK(leasehold_sim_stream_destroy(device, native));
    }
#endif
    OK(leasehold_buffer_release(a));
}

static void events(void) {
    leasehold_event from, to, plain;
    leasehold_buffer a = alloc(stream, BYTES);
    leasehold_point points[2], last;
    leasehold_stream second;
    uint64_t nanoseconds = 0;
    size_t which = 9;
    int over;
    OK(leasehold_event_create(runtime, LEASEHOLD_EVENT_TIMING, &from));
    OK(leasehold_event_create(runtime, LEASEHOLD_EVENT_TIMING | LEASEHOLD_EVENT_SLEEPS, &to));
    OK(leasehold_event_create(runtime, 0, &plain));
    OK(leasehold_event_query(plain, &over));
    THAT(over == 1 && leasehold_event_point(plain, &last) == LEASEHOLD_INVALID_STATE);
    THAT(leasehold_event_elapsed_blocking(plain, to, &nanoseconds) == LEASEHOLD_INVALID_STATE);
    THAT(strstr(leasehold_last_error(), "leasehold_event_create with LEASEHOLD_EVENT_TIMING") != NULL);
    THAT(leasehold_event_elapsed_blocking(from, to, &nanoseconds) == LEASEHOLD_INVALID_STATE);
    THAT(strstr(leasehold_last_error(), "leasehold_event_record") != NULL);
    OK(leasehold_event_record(from, stream, &points[0]));
    OK(leasehold_stream_fill(stream, whole(a, 0), 7, 1, NULL));
    OK(leasehold_event_record(to, stream, &points[1]));
    OK(leasehold_event_record(plain, stream, NULL));
    OK(leasehold_event_retain(plain));
    OK(leasehold_event_release(plain));
    OK(leasehold_stream_create(runtime, NULL, &second));
    OK(leasehold_stream_wait_event(second, plain));
    OK(leasehold_event_elapsed_blocking(from, to, &nanoseconds));
    OK(leasehold_event_synchronize(to, LEASEHOLD_FOREVER));
    OK(leasehold_event_synchronize(plain, SECONDS));
    OK(leasehold_event_query(plain, &over));
    OK(leasehold_event_point(to, &last));
    THAT(over == 1 && last.timeline == points[1].timeline && last.value <= points[1].value);
    OK(leasehold_wait_all(runtime, points, 2, SECONDS));
    OK(leasehold_wait_all(runtime, NULL, 0, 0));
    OK(leasehold_wait_any(runtime, points, 2, LEASEHOLD_FOREVER, &which));
    THAT(which == 0 && nanoseconds > 0);
    OK(leasehold_stream_release(second));
    OK(leasehold_event_release(from));
    OK(leasehold_event_release(to));
    OK(leasehold_event_release(plain));
    OK(leasehold_buffer_release(a));
}

static void kernels(void) {
    leasehold_kernel kernel = define();
    leasehold_buffer x = alloc(stream, BYTES), y = alloc(stream, BYTES);
    leasehold_launch launches[3];
    leasehold_operand operands[2], back[2];
    leasehold_point point;
    scales p = {1.0f, 1.0f, COUNT};
    uint64_t blocks = 0;
    int i, before = released;
    OK(leasehold_kernel_prepare(kernel, runtime));
    /* A device of CUDA says how many blocks run at the same time. */
    if (leasehold_kernel_resident_blocks(kernel, runtime, 64, 0, &blocks) == LEASEHOLD_OK) {
        THAT(blocks > 0);
    }
    OK(leasehold_kernel_retain(kernel));
    OK(leasehold_kernel_release(kernel));
    OK(leasehold_stream_fill(stream, whole(x, 0), 0x3f800000, 4, NULL));
    OK(leasehold_stream_fill(stream, whole(y, 0), 0, 1, NULL));
    launch(stream, kernel, x, y, 3.0f, 0.0f, &point);
    THAT(all_are(y, 3.0f) && checked == 1);
    operands[0] = whole(x, LEASEHOLD_READ);
    operands[1] = whole(y, LEASEHOLD_READ_WRITE);
    back[0] = whole(y, LEASEHOLD_READ);
    back[1] = whole(x, LEASEHOLD_READ_WRITE);
    for (i = 0; i < 3; i++) {
        launches[i].kernel = kernel;
        launches[i].grid = grid;
        launches[i].operands = i == 1 ? back : operands;
        launches[i].operand_count = 2;
        launches[i].params = &p;
        launches[i].params_bytes = sizeof p;
    }
    /* 1, 3 -> 1, 4 -> 5, 4 -> 5, 9 */
    OK(leasehold_stream_launch_many(stream, launches, 3, &point));
    THAT(all_are(x, 5.0f) && all_are(y, 9.0f));
    OK(leasehold_stream_launch_many(stream, NULL, 0, NULL));
    /* A launch that the check refuses does not run. */
    p.n = COUNT + 1;
    THAT(leasehold_stream_launch(stream, kernel, &grid, operands, 2, &p, sizeof p, NULL) == LEASEHOLD_INVALID_ARGUMENT);
    THAT(leasehold_stream_launch_many(stream, launches, 3, NULL) == LEASEHOLD_INVALID_ARGUMENT);
    THAT(all_are(x, 5.0f) && all_are(y, 9.0f));
    OK(leasehold_kernel_release(kernel));
    THAT(released == before + 1);
    OK(leasehold_buffer_release(x));
    OK(leasehold_buffer_release(y));
}

static int host(void *context) {
    atomic_fetch_add((atomic_int *)context, 1);
    return 0;
}

static int foreign(void *context, uintptr_t native, const leasehold_binding *bindings, size_t count) {
    (void)native;
    THAT(count == 1 && bindings[0].bytes == BYTES && bindings[0].access == LEASEHOLD_READ && bindings[0].address != 0);
    atomic_fetch_add((atomic_int *)context, 1);
    return 0;
}

static void calls(void) {
    leasehold_runtime_info info;
    leasehold_buffer a = alloc(stream, BYTES);
    leasehold_operand operand = whole(a, LEASEHOLD_READ);
    leasehold_point point;
    int before = released;
    info.size = sizeof info;
    OK(leasehold_runtime_describe(runtime, &info));
    OK(leasehold_stream_fill(stream, whole(a, 0), 0, 1, NULL));
    OK(leasehold_stream_host_call(stream, host, release, (void *)&called, &point));
    OK(leasehold_wait_all(runtime, &point, 1, LEASEHOLD_FOREVER));
    THAT(called == 1);
    if (info.features & LEASEHOLD_FEATURE_FOREIGN_CALLS) {
        OK(leasehold_stream_foreign_call(stream, &operand, 1, foreign, release, (void *)&called, &point));
        OK(leasehold_stream_synchronize(stream, LEASEHOLD_FOREVER));
        THAT(called == 2);
    } else {
        THAT(leasehold_stream_foreign_call(stream, &operand, 1, foreign, release, (void *)&called, &point) == LEASEHOLD_UNSUPPORTED);
        atomic_fetch_add(&released, 1);
    }
    OK(leasehold_buffer_release(a));
    OK(leasehold_runtime_synchronize(runtime, LEASEHOLD_FOREVER));
    /* The thread that ran a call may drop it a moment later. */
    while (released != before + 2) {
        OK(leasehold_runtime_synchronize(runtime, LEASEHOLD_FOREVER));
    }
}

static void graphs(void) {
    leasehold_kernel kernel = define();
    leasehold_buffer x = alloc(stream, BYTES), y = alloc(stream, BYTES), z = alloc(stream, BYTES), scratch;
    leasehold_buffer_info about;
    leasehold_graph_info info;
    leasehold_graph_change changes[3];
    leasehold_stream recorded, second;
    leasehold_graph graph;
    leasehold_event event;
    leasehold_point point = {1, 1};
    scales p = {2.0f, 0.0f, COUNT};
    uint32_t node = 99;
    char *json;
    int again = -1, over;
    OK(leasehold_event_create(runtime, 0, &event));
    OK(leasehold_stream_fill(stream, whole(x, 0), 0x3f800000, 4, NULL));
    OK(leasehold_stream_fill(stream, whole(y, 0), 0, 1, NULL));
    OK(leasehold_stream_fill(stream, whole(z, 0), 0, 1, NULL));
    OK(leasehold_record_begin(runtime, &recorded));
    scratch = alloc(recorded, BYTES);
    about.size = sizeof about;
    OK(leasehold_buffer_describe(scratch, &about));
    THAT(about.address == 0 && about.flags & LEASEHOLD_BUFFER_RECORDED);
    OK(leasehold_stream_copy(recorded, whole(scratch, 0), whole(x, 0), &point));
    THAT(point.timeline == 0 && point.value == 0);
    OK(leasehold_record_next(recorded, &node));
    THAT(node == 1);
    launch(recorded, kernel, scratch, y, 3.0f, 0.0f, NULL);
    OK(leasehold_stream_host_call(recorded, host, NULL, (void *)&called, NULL));
    OK(leasehold_event_record(event, recorded, &point));
    THAT(point.timeline == 0);
    /* Other streams go on, and a recording runs nothing. */
    THAT(all_are(y, 0.0f));
    OK(leasehold_buffer_release(scratch));
    OK(leasehold_record_end(recorded, &graph));
    THAT(leasehold_stream_fill(recorded, whole(x, 0), 0, 1, NULL) == LEASEHOLD_INVALID_STATE);
    OK(leasehold_stream_release(recorded));
    called = 0;
    OK(leasehold_graph_launch(graph, stream, &point));
    THAT(point.timeline != 0 && all_are(y, 3.0f) && called == 1);
    OK(leasehold_event_query(event, &over));
    OK(leasehold_event_synchronize(event, LEASEHOLD_FOREVER));
    OK(leasehold_stream_create(runtime, NULL, &second));
    memset(changes, 0, sizeof changes);
    changes[0].kind = LEASEHOLD_CHANGE_PARAMS;
    changes[0].node = node;
    changes[0].params = &p;
    changes[0].params_bytes = sizeof p;
    changes[1].kind = LEASEHOLD_CHANGE_BUFFER;
    changes[1].from = y;
    changes[1].to = z;
    changes[2].kind = LEASEHOLD_CHANGE_GRID;
    changes[2].node = node;
    memcpy(changes[2].grid, grid.blocks, sizeof grid.blocks);
    OK(leasehold_graph_update(graph, changes, 3, &again));
    THAT(again == 0 || again == 1);
    OK(leasehold_graph_launch(graph, second, NULL));
    THAT(all_are(z, 2.0f) && all_are(y, 3.0f));
    OK(leasehold_graph_retain(graph));
    OK(leasehold_graph_release(graph));
    info.size = sizeof info;
    OK(leasehold_graph_describe(graph, &info));
    THAT(info.recorded >= 3 && info.launches == 2 && info.arena_bytes >= BYTES);
    OK(leasehold_graph_nodes(graph, &json));
    THAT(strstr(json, "axpby") != NULL && json[0] == '[');
    leasehold_text_free(json);
    OK(leasehold_graph_release(graph));
    /* One that is given up leaves nothing behind; one that is dropped neither. */
    OK(leasehold_record_begin(runtime, &recorded));
    OK(leasehold_stream_fill(recorded, whole(x, 0), 0, 1, NULL));
    OK(leasehold_record_cancel(recorded));
    THAT(leasehold_record_cancel(recorded) == LEASEHOLD_INVALID_STATE);
    OK(leasehold_stream_release(recorded));
    OK(leasehold_record_begin(runtime, &recorded));
    OK(leasehold_stream_host_call(recorded, host, release, (void *)&called, NULL));
    over = released;
    OK(leasehold_stream_release(recorded));
    THAT(released == over + 1);
    OK(leasehold_stream_synchronize(second, LEASEHOLD_FOREVER));
    OK(leasehold_stream_release(second));
    OK(leasehold_event_release(event));
    OK(leasehold_kernel_release(kernel));
    OK(leasehold_buffer_release(x));
    OK(leasehold_buffer_release(y));
    OK(leasehold_buffer_release(z));
}

static void *signal_later(void *timeline) {
    leasehold_point point;
    OK(leasehold_host_timeline_next(*(leasehold_host_timeline *)timeline, &point));
    OK(leasehold_host_timeline_signal(point.timeline, point.value));
    return NULL;
}

static void host_timelines(void) {
    leasehold_host_timeline timeline, broken;
    leasehold_stream second;
    leasehold_buffer a = alloc(stream, BYTES);
    leasehold_point point, points[2];
    pthread_t thread;
    size_t which = 9;
    int over = 1, status = 0;
    OK(leasehold_stream_create(runtime, NULL, &second));
    OK(leasehold_host_timeline_create(runtime, &timeline));
    OK(leasehold_host_timeline_retain(timeline));
    OK(leasehold_host_timeline_release(timeline));
    OK(leasehold_host_timeline_next(timeline, &point));
    OK(leasehold_stream_wait_point(second, point));
    OK(leasehold_stream_fill(second, whole(a, 0), 0x40400000, 4, &points[1]));
    OK(leasehold_stream_query(second, &over));
    THAT(over == 0);
    THAT(leasehold_stream_synchronize(second, 1000000) == LEASEHOLD_TIMEOUT);
    THAT(leasehold_runtime_synchronize(runtime, 0) == LEASEHOLD_TIMEOUT);
    points[0] = point;
    THAT(leasehold_wait_all(runtime, points, 2, 1000) == LEASEHOLD_TIMEOUT);
    THAT(leasehold_wait_any(runtime, points, 2, 1000, &which) == LEASEHOLD_TIMEOUT);
    pthread_create(&thread, NULL, signal_later, &timeline);
    OK(leasehold_wait_all(runtime, points, 2, LEASEHOLD_FOREVER));
    pthread_join(thread, NULL);
    THAT(all_are(a, 3.0f));
    OK(leasehold_wait_any(runtime, points, 2, 0, &which));
    OK(leasehold_host_timeline_create(runtime, &broken));
    OK(leasehold_host_timeline_next(broken, &point));
    OK(leasehold_stream_wait_point(second, point));
    OK(leasehold_host_timeline_fail(broken, "on purpose"));
    THAT(leasehold_stream_synchronize(second, LEASEHOLD_FOREVER) != LEASEHOLD_OK);
    OK(leasehold_stream_failure(second, &status));
    THAT(status != LEASEHOLD_OK && strstr(leasehold_last_error(), "on purpose") != NULL);
    OK(leasehold_host_timeline_release(broken));
    OK(leasehold_host_timeline_release(timeline));
    OK(leasehold_stream_release(second));
    OK(leasehold_buffer_release(a));
}

/* What nobody can signal any more fails, at once, and others' signals do not stand for it. */
static void ended_host_timelines(void) {
    leasehold_host_timeline timeline, others[64];
    leasehold_stream second, recording;
    leasehold_buffer a = alloc(stream, BYTES);
    leasehold_graph graph;
    leasehold_point point, other;
    OK(leasehold_stream_fill(stream, whole(a, 0), 0x3f800000, 4, NULL));
    OK(leasehold_stream_create(runtime, NULL, &second));
    OK(leasehold_host_timeline_create(runtime, &timeline));
    OK(leasehold_host_timeline_next(timeline, &point));
    OK(leasehold_record_begin(runtime, &recording));
    OK(leasehold_stream_wait_point(recording, point));
    OK(leasehold_stream_fill(recording, whole(a, 0), 0x40400000, 4, NULL));
    OK(leasehold_record_end(recording, &graph));
    OK(leasehold_stream_release(recording));
    OK(leasehold_host_timeline_release(timeline));
    THAT(leasehold_graph_launch(graph, second, NULL) == LEASEHOLD_INVALID_STATE);
    THAT(strstr(leasehold_last_error(), "dropped before the value was signalled") != NULL);
    for (size_t i = 0; i < 64; i++) {
        OK(leasehold_host_timeline_create(runtime, &others[i]));
        OK(leasehold_host_timeline_next(others[i], &other));
        OK(leasehold_host_timeline_signal(others[i], other.value + 10));
    }
    THAT(leasehold_graph_launch(graph, second, NULL) == LEASEHOLD_INVALID_STATE);
    OK(leasehold_stream_synchronize(second, LEASEHOLD_FOREVER));
    THAT(all_are(a, 1.0f));
    for (size_t i = 0; i < 64; i++)
        OK(leasehold_host_timeline_release(others[i]));
    OK(leasehold_graph_release(graph));
    OK(leasehold_stream_release(second));
    OK(leasehold_buffer_release(a));
}

/* Returns whether a file has a text, and removes the file. */
static int file_has(const char *path, const char *text) {
    static char bytes[1 << 20];
    FILE *file = fopen(path, "rb");
    size_t read;
    THAT(file != NULL);
    read = fread(bytes, 1, sizeof bytes - 1, file);
    fclose(file);
    remove(path);
    bytes[read] = 0;
    return strstr(bytes, text) != NULL;
}

static void traces(void) {
    char path[4096];
    const char *folder = getenv("TMPDIR");
    leasehold_buffer a;
    snprintf(path, sizeof path, "%s/leasehold-trace-%ld.json", folder == NULL ? "." : folder, (long)getpid());
    OK(leasehold_trace_start(runtime));
    a = alloc(stream, BYTES);
    OK(leasehold_buffer_set_name(a, "weights"));
    OK(leasehold_stream_fill(stream, whole(a, 0), 0, 4, NULL));
    OK(leasehold_trace_stop(runtime, path, 10 * SECONDS));
    THAT(file_has(path, "writes weights"));
    /* A file that cannot be written loses nothing. */
    OK(leasehold_trace_start(runtime));
    OK(leasehold_stream_fill(stream, whole(a, 0), 1, 4, NULL));
    THAT(leasehold_trace_stop(runtime, "/nowhere/trace.json", 10 * SECONDS) == LEASEHOLD_UNAVAILABLE);
    THAT(strstr(leasehold_last_error(), "/nowhere/trace.json") != NULL);
    OK(leasehold_trace_stop(runtime, path, 0));
    THAT(file_has(path, "\"fill\""));
    OK(leasehold_trace_start(runtime));
    OK(leasehold_trace_stop(runtime, NULL, 0));
    OK(leasehold_buffer_release(a));
}

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "cpu:0";
    leasehold_runtime_info info;
    OK(leasehold_device_open(name, NULL, &device));
    OK(leasehold_runtime_open(device, &runtime));
    OK(leasehold_runtime_stream(runtime, &stream));
    THAT(leasehold_abi_version() == LEASEHOLD_ABI_VERSION);
    runtimes(name);
    buffers();
    transfers();
    streams();
    natives(name);
    events();
    kernels();
    calls();
    graphs();
    host_timelines();
    ended_host_timelines();
    traces();
    info.size = sizeof info;
    OK(leasehold_runtime_describe(runtime, &info));
    THAT(info.allocated_bytes == 0);
    OK(leasehold_stream_release(stream));
    THAT(leasehold_runtime_close(runtime, 10 * SECONDS) != LEASEHOLD_TIMEOUT);
    OK(leasehold_device_close(device));
#ifdef LEASEHOLD_SIM
    if (strncmp(name, "sim-", 4) == 0) {
        char *races;
        OK(leasehold_sim_races(&races));
        if (*races != '\0') {
            fprintf(stderr, "races:\n%s\n", races);
            return 1;
        }
        leasehold_text_free(races);
    }
#endif
    printf("ok\n");
    return 0;
}
