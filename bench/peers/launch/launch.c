/* The same launches as launch.py's, by the C ABI of a library that is named.
 *
 *     cc -O2 -shared -fPIC -I crates/capi/include launch.c -o launch.so -ldl
 */
#define _GNU_SOURCE
#include "leasehold_runtime.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { ROUNDS = 25, LAUNCHES = 400, COUNT = 256 };

static void *library;

static void *function(const char *name) {
    void *found = dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "no %s\n", name);
        exit(1);
    }
    return found;
}

#define CALL(name, ...) check(((int (*)())function(#name))(__VA_ARGS__), #name)

static void check(int status, const char *what) {
    if (status != LEASEHOLD_OK) {
        fprintf(stderr, "%s: %d %s\n", what, status, ((const char *(*)(void))function("leasehold_last_error"))());
        exit(1);
    }
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

/* The microseconds of a launch on a device. */
double measure(const char *path, const char *name) {
    static const uint32_t access[] = {LEASEHOLD_READ, LEASEHOLD_READ, LEASEHOLD_WRITE};
    static const char code[] = "extern \"C\" __global__ void nothing(const float* x, const float* y, float* z, float a, unsigned n) {}";
    struct {
        float a;
        uint32_t n;
    } params = {1.0f, COUNT};
    leasehold_kernel_source source = {0};
    leasehold_kernel_desc desc = {0};
    leasehold_grid grid = {{1, 1, 1}, {32, 1, 1}, 0, 0};
    leasehold_operand operands[3];
    leasehold_device device;
    leasehold_runtime runtime;
    leasehold_stream stream;
    leasehold_kernel kernel;
    double least = 1e30;
    int (*launch)(leasehold_stream, leasehold_kernel, const leasehold_grid *, const leasehold_operand *, size_t, const void *, size_t,
                  leasehold_point *);
    int i, round;
    if ((library = dlopen(path, RTLD_NOW)) == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    launch = (int (*)(leasehold_stream, leasehold_kernel, const leasehold_grid *, const leasehold_operand *, size_t, const void *, size_t,
                      leasehold_point *))function("leasehold_stream_launch");
    CALL(leasehold_device_open, name, NULL, &device);
    CALL(leasehold_runtime_open, device, &runtime);
    CALL(leasehold_stream_create, runtime, NULL, &stream);
    for (i = 0; i < 3; i++) {
        operands[i] = (leasehold_operand){0, 0, LEASEHOLD_WHOLE, access[i], 0};
        CALL(leasehold_buffer_alloc, stream, (uint64_t)COUNT * 4, &operands[i].buffer);
    }
    source.kind = LEASEHOLD_SOURCE_CUDA_C;
    source.code = code;
    desc.size = sizeof desc;
    desc.name = "nothing";
    desc.sources = &source;
    desc.source_count = 1;
    desc.access = access;
    desc.binding_count = 3;
    desc.params_bytes = sizeof params;
    CALL(leasehold_kernel_define, &desc, &kernel);
    for (round = 0; round < ROUNDS + 1; round++) {
        double begin = now(), time;
        for (i = 0; i < LAUNCHES; i++) {
            check(launch(stream, kernel, &grid, operands, 3, &params, sizeof params, NULL), "launch");
        }
        time = now() - begin;
        least = round > 0 && time < least ? time : least;
        CALL(leasehold_stream_synchronize, stream, LEASEHOLD_FOREVER);
    }
    return least / LAUNCHES;
}
