/* The runtime from C: a kernel for the CPU and for CUDA, two streams whose order comes from what they use, a graph, a wait in stream order.
 *
 *     runtime [cpu:0 | cuda:0 | cuda:1 …]
 */
#include "leasehold_runtime.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 1 << 20, TILE = 4096, THREADS = 256 };

/* Ends the program after a failure, with its text. */
static void check(int status, const char *what) {
    if (status != LEASEHOLD_OK) {
        char text[4096];
        leasehold_error_text(text, sizeof text);
        fprintf(stderr, "%s: %s (%d)\n", what, text, status);
        exit(1);
    }
}

/* y = a * x + y: what both sources are given. */
typedef struct {
    float a;
    uint32_t count;
} parameters;

/* A tile on the CPU has TILE elements. Tiles run at the same time, each on elements of its own. */
static void saxpy(const leasehold_tile *tile) {
    const float *x = (const float *)(uintptr_t)tile->bindings[0].address;
    float *y = (float *)(uintptr_t)tile->bindings[1].address;
    parameters p;
    uint32_t i = tile->tile[0] * TILE, end = i + TILE;
    memcpy(&p, tile->params, sizeof p);
    for (; i < end && i < p.count; i++) {
        y[i] += p.a * x[i];
    }
}

/* A block on a GPU has TILE elements too, and goes over them with its threads. */
static const char saxpy_cuda[] = "struct Parameters { float a; unsigned count; };\n"
                                 "extern \"C\" __global__ void saxpy(const float *x, float *y, Parameters p) {\n"
                                 "    unsigned end = (blockIdx.x + 1) * 4096;\n"
                                 "    for (unsigned i = blockIdx.x * 4096 + threadIdx.x; i < end && i < p.count; i += blockDim.x)\n"
                                 "        y[i] += p.a * x[i];\n"
                                 "}\n";

/* A launch is right if each element exists, and has one tile. */
static int accepts(void *context, const leasehold_launch_info *launch) {
    parameters p;
    (void)context;
    memcpy(&p, launch->params, sizeof p);
    if (launch->blocks[0] > UINT32_MAX / TILE || launch->blocks[1] != 1 || launch->blocks[2] != 1 || launch->threads[1] != 1 || launch->threads[2] != 1) {
        return 1;
    }
    return launch->binding_bytes[0] / sizeof(float) < p.count || launch->binding_bytes[1] / sizeof(float) < p.count;
}

static leasehold_kernel define(void) {
    static const uint32_t access[] = {LEASEHOLD_READ, LEASEHOLD_READ_WRITE};
    leasehold_kernel_source sources[2] = {{0}, {0}};
    leasehold_kernel_desc desc = {0};
    leasehold_kernel kernel;
    sources[0].kind = LEASEHOLD_SOURCE_C_FUNCTION;
    sources[0].function = saxpy;
    sources[1].kind = LEASEHOLD_SOURCE_CUDA_C;
    sources[1].code = saxpy_cuda;
    desc.size = sizeof desc;
    desc.name = "saxpy";
    desc.sources = sources;
    desc.source_count = 2;
    desc.access = access;
    desc.binding_count = 2;
    desc.params_bytes = sizeof(parameters);
    desc.alignment = 4;
    desc.check = accepts;
    /* Here we vouch for the code. Launches are checked from then on. */
    check(leasehold_kernel_define(&desc, &kernel), "kernel");
    return kernel;
}

static leasehold_operand part(leasehold_buffer buffer, uint64_t offset, uint64_t bytes, uint32_t access) {
    leasehold_operand operand = {buffer, offset, bytes, access, 0};
    return operand;
}

static leasehold_operand all_of(leasehold_buffer buffer, uint32_t access) {
    return part(buffer, 0, LEASEHOLD_WHOLE, access);
}

static void launch(leasehold_stream stream, leasehold_kernel kernel, float a, leasehold_buffer x, leasehold_buffer y) {
    const leasehold_grid grid = {{COUNT / TILE, 1, 1}, {THREADS, 1, 1}, 0, 0};
    const leasehold_operand operands[] = {all_of(x, LEASEHOLD_READ), all_of(y, LEASEHOLD_READ_WRITE)};
    const parameters p = {a, COUNT};
    check(leasehold_stream_launch(stream, kernel, &grid, operands, 2, &p, sizeof p, NULL), "launch");
}

/* Runs on a thread of the library's, when the stream comes to it. */
static int tell(void *context) {
    printf("%s\n", (const char *)context);
    return 0;
}

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "cpu:0";
    float *values = malloc(COUNT * sizeof(float));
    leasehold_device device;
    leasehold_runtime runtime;
    leasehold_stream compute, copies, recorded;
    leasehold_buffer x, y, result;
    leasehold_buffer_info info;
    leasehold_event begin, end;
    leasehold_graph graph;
    leasehold_kernel kernel = define();
    leasehold_point point;
    uint64_t nanoseconds;
    uint32_t i;
    if (values == NULL) {
        return 1;
    }
    check(leasehold_device_open(name, NULL, &device), name);
    check(leasehold_runtime_open(device, &runtime), "runtime");
    check(leasehold_runtime_stream(runtime, &compute), "stream");
    check(leasehold_stream_create(runtime, NULL, &copies), "stream");

    check(leasehold_buffer_alloc(copies, COUNT * sizeof(float), &x), "buffer");
    check(leasehold_buffer_alloc(compute, COUNT * sizeof(float), &y), "buffer");
    for (i = 0; i < COUNT; i++) {
        values[i] = (float)(i % 1000);
    }
    /* No call waits, and nobody says what comes after what: the launch waits for the upload, since it reads x. */
    check(leasehold_stream_upload(copies, all_of(x, LEASEHOLD_WRITE), values, COUNT * sizeof(float), NULL), "upload");
    check(leasehold_stream_fill(compute, all_of(y, LEASEHOLD_WRITE), 0, 4, NULL), "fill");
    launch(compute, kernel, 2.0f, x, y);

    /* The same launch ten times, recorded once, is one submission. */
    check(leasehold_record_begin(runtime, &recorded), "recording");
    for (i = 0; i < 10; i++) {
        launch(recorded, kernel, 1.0f, x, y);
    }
    check(leasehold_stream_host_call(recorded, tell, NULL, "the graph is over", NULL), "host call");
    check(leasehold_record_end(recorded, &graph), "graph");
    check(leasehold_stream_release(recorded), "release");
    check(leasehold_event_create(runtime, LEASEHOLD_EVENT_TIMING, &begin), "event");
    check(leasehold_event_create(runtime, LEASEHOLD_EVENT_TIMING, &end), "event");
    check(leasehold_event_record(begin, compute, NULL), "event");
    check(leasehold_graph_launch(graph, compute, NULL), "graph");
    check(leasehold_event_record(end, compute, NULL), "event");

    /* Pinned memory is read without a wait in between; one wait at the end. */
    check(leasehold_buffer_alloc_pinned(copies, 4096, &result), "pinned");
    check(leasehold_stream_copy(copies, all_of(result, LEASEHOLD_WRITE), part(y, 0, 4096, LEASEHOLD_READ), &point), "copy");
    check(leasehold_wait_all(runtime, &point, 1, LEASEHOLD_FOREVER), "wait");
    info.size = sizeof info;
    check(leasehold_buffer_describe(result, &info), "describe");
    for (i = 0; i < 4096 / sizeof(float); i++) {
        float expected = 12.0f * (float)(i % 1000), got = ((const float *)(uintptr_t)info.address)[i];
        if (got != expected) {
            fprintf(stderr, "y[%" PRIu32 "] is %g, not %g\n", i, (double)got, (double)expected);
            return 1;
        }
    }
    check(leasehold_event_elapsed_blocking(begin, end, &nanoseconds), "time");
    printf("ten launches: %" PRIu64 " us\n", nanoseconds / 1000);

    /* A launch beyond the end is refused, and nothing runs. */
    {
        const leasehold_grid grid = {{COUNT / TILE, 1, 1}, {THREADS, 1, 1}, 0, 0};
        const leasehold_operand operands[] = {all_of(x, LEASEHOLD_READ), part(y, 0, 4096, LEASEHOLD_READ_WRITE)};
        const parameters p = {1.0f, COUNT};
        int status = leasehold_stream_launch(compute, kernel, &grid, operands, 2, &p, sizeof p, NULL);
        printf("refused: %s (%d)\n", leasehold_last_error(), status);
        if (status != LEASEHOLD_INVALID_ARGUMENT) {
            return 1;
        }
    }
    free(values);
    check(leasehold_event_release(begin), "release");
    check(leasehold_event_release(end), "release");
    check(leasehold_graph_release(graph), "release");
    check(leasehold_kernel_release(kernel), "release");
    check(leasehold_buffer_release(x), "release");
    check(leasehold_buffer_release(y), "release");
    check(leasehold_buffer_release(result), "release");
    check(leasehold_stream_release(compute), "release");
    check(leasehold_stream_release(copies), "release");
    check(leasehold_runtime_close(runtime, LEASEHOLD_FOREVER), "close");
    check(leasehold_device_close(device), "close");
    printf("ok\n");
    return 0;
}
