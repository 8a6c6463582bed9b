/* The errors of worlds and communicators: each call is wrong, gets its status and a text, and changes nothing. Prints "ok", or what is wrong,
 * with status 1.
 *
 *     ranks_misuse [cpu:0 | sim-cuda:0]
 */
#define _GNU_SOURCE
#include "checks.h"

#include <string.h>

enum { BYTES = 256 };

static leasehold_device device;
static leasehold_runtime runtime;
static leasehold_stream stream;
static leasehold_buffer buffer;
static leasehold_world world;
static leasehold_comm comm;

static leasehold_operand part(leasehold_buffer of, uint64_t offset, uint64_t bytes) {
    leasehold_operand operand = {of, offset, bytes, 0, 0};
    return operand;
}

static void wrong_handles(uint64_t handle) {
    leasehold_world_info world_info = {.size = sizeof world_info};
    leasehold_comm_info comm_info = {.size = sizeof comm_info};
    leasehold_collective barrier = {.call = LEASEHOLD_BARRIER};
    uint64_t made;
    char *text;
    int status;
    if (handle != world) {
        INVALID(leasehold_world_describe(handle, &world_info));
        INVALID(leasehold_world_report(handle, 0, &text));
        INVALID(leasehold_world_retain(handle));
        INVALID(leasehold_world_release(handle));
        INVALID(leasehold_world_close(handle, 0));
        INVALID(leasehold_comm_create(handle, runtime, NULL, &made));
    }
    if (handle != runtime) {
        INVALID(leasehold_comm_create(world, handle, NULL, &made));
    }
    if (handle != comm) {
        INVALID(leasehold_comm_describe(handle, &comm_info));
        INVALID(leasehold_comm_failure(handle, &status));
        INVALID(leasehold_comm_retain(handle));
        INVALID(leasehold_comm_release(handle));
        INVALID(leasehold_comm_split(handle, 0, 0, &made));
        INVALID(leasehold_comm_shrink(handle, NULL, 0, &made));
        INVALID(leasehold_comm_abort(handle, "no such"));
        INVALID(leasehold_comm_call(handle, stream, &barrier, 1, NULL));
    }
    if (handle != stream) {
        INVALID(leasehold_comm_call(comm, handle, &barrier, 1, NULL));
    }
}

static void null_pointers(void) {
    INVALID(leasehold_world_open(NULL));
    INVALID(leasehold_world_open_threads(2, NULL));
    INVALID(leasehold_world_describe(world, NULL));
    INVALID(leasehold_world_report(world, 0, NULL));
    INVALID(leasehold_comm_create(world, runtime, NULL, NULL));
    INVALID(leasehold_comm_describe(comm, NULL));
    INVALID(leasehold_comm_failure(comm, NULL));
    INVALID(leasehold_comm_split(comm, 0, 0, NULL));
    INVALID(leasehold_comm_shrink(comm, NULL, 0, NULL));
    INVALID(leasehold_comm_abort(comm, NULL));
    INVALID(leasehold_comm_call(comm, stream, NULL, 1, NULL));
}

static void worlds(void) {
    leasehold_world made[2];
    leasehold_comm none;
    leasehold_comm_desc desc = {sizeof desc, "alone", SECONDS / 10, 0, 0};
    INVALID(leasehold_world_open_threads(0, made));
    INVALID(leasehold_world_open_threads(65537, made));
    unsetenv("RANK");
    IS(LEASEHOLD_NOT_FOUND, leasehold_world_open(made));
    setenv("LEASEHOLD_RANK", "5", 1);
    INVALID(leasehold_world_open(made));
    setenv("LEASEHOLD_WORLD", "2", 1);
    INVALID(leasehold_world_open(made));
    setenv("LEASEHOLD_RANK", "many", 1);
    INVALID(leasehold_world_open(made));
    /* The other rank does not come. */
    OK(leasehold_world_open_threads(2, made));
    IS(LEASEHOLD_TIMEOUT, leasehold_comm_create(made[0], runtime, &desc, &none));
    IS(LEASEHOLD_TIMEOUT, leasehold_world_close(made[0], SECONDS / 10));
    OK(leasehold_world_release(made[0]));
    OK(leasehold_world_release(made[1]));
}

static void descriptions(void) {
    leasehold_comm_desc desc = {sizeof desc, "a/b", 0, 0, 0};
    leasehold_comm none;
    INVALID(leasehold_comm_create(world, runtime, &desc, &none));
    desc.name = "";
    INVALID(leasehold_comm_create(world, runtime, &desc, &none));
    desc.name = "\xff";
    INVALID(leasehold_comm_create(world, runtime, &desc, &none));
    desc.name = NULL;
    desc.flags = 8;
    INVALID(leasehold_comm_create(world, runtime, &desc, &none));
    desc.flags = 0;
    desc.reserved = 1;
    INVALID(leasehold_comm_create(world, runtime, &desc, &none));
    desc.reserved = 0;
    desc.size = 1;
    INVALID(leasehold_comm_create(world, runtime, &desc, &none));
}

static void calls(void) {
    const uint32_t own = 0, other = 9;
    const leasehold_operand none = part(0, 0, 0), all = part(buffer, 0, BYTES), half = part(buffer, 0, BYTES / 2);
    leasehold_comm made;
    size_t i;
    const leasehold_collective wrong[] = {
        {0, LEASEHOLD_F32, 0, 0, all, none},
        {10, LEASEHOLD_F32, 0, 0, all, none},
        /* An element, a reduction or a rank that is not there, or that the call does not have. */
        {LEASEHOLD_ALL_REDUCE, 0, LEASEHOLD_SUM, 0, all, none},
        {LEASEHOLD_ALL_REDUCE, 13, LEASEHOLD_SUM, 0, all, none},
        {LEASEHOLD_ALL_REDUCE, LEASEHOLD_F32, 0, 0, all, none},
        {LEASEHOLD_ALL_REDUCE, LEASEHOLD_F32, 6, 0, all, none},
        {LEASEHOLD_ALL_REDUCE, LEASEHOLD_I32, LEASEHOLD_AVERAGE, 0, all, none},
        {LEASEHOLD_ALL_REDUCE, LEASEHOLD_F32, LEASEHOLD_SUM, 1, all, none},
        {LEASEHOLD_ALL_GATHER, LEASEHOLD_F32, LEASEHOLD_SUM, 0, all, all},
        {LEASEHOLD_BROADCAST, LEASEHOLD_F32, 0, 1, all, none},
        {LEASEHOLD_REDUCE, LEASEHOLD_F32, LEASEHOLD_SUM, 1, all, none},
        {LEASEHOLD_SEND, LEASEHOLD_F32, 0, 1, none, all},
        {LEASEHOLD_SEND, LEASEHOLD_F32, 0, 0, none, all},
        /* Memory that is missing, of no buffer, outside, too long, not aligned, of another access, or that overlaps. */
        {LEASEHOLD_ALL_REDUCE, LEASEHOLD_F32, LEASEHOLD_SUM, 0, none, none},
        {LEASEHOLD_ALL_REDUCE, LEASEHOLD_F32, LEASEHOLD_SUM, 0, none, all},
        {LEASEHOLD_ALL_GATHER, LEASEHOLD_F32, 0, 0, all, none},
        {LEASEHOLD_BROADCAST, LEASEHOLD_F32, 0, 0, all, all},
        {LEASEHOLD_BARRIER, 0, 0, 0, all, none},
        {LEASEHOLD_RECV, LEASEHOLD_F32, 0, 0, none, all},
        {LEASEHOLD_ALL_REDUCE, LEASEHOLD_F32, LEASEHOLD_SUM, 0, part(stream, 0, 4), none},
        {LEASEHOLD_ALL_REDUCE, LEASEHOLD_F32, LEASEHOLD_SUM, 0, part(buffer, BYTES, 4), none},
        {LEASEHOLD_ALL_REDUCE, LEASEHOLD_F32, LEASEHOLD_SUM, 0, part(buffer, 0, UINT64_MAX - 1), none},
        {LEASEHOLD_ALL_REDUCE, LEASEHOLD_F32, LEASEHOLD_SUM, 0, part(buffer, 2, 8), none},
        {LEASEHOLD_ALL_REDUCE, LEASEHOLD_F32, LEASEHOLD_SUM, 0, part(buffer, 0, 6), none},
        {LEASEHOLD_ALL_REDUCE, LEASEHOLD_F32, LEASEHOLD_SUM, 0, {buffer, 0, 8, LEASEHOLD_READ, 0}, none},
        {LEASEHOLD_ALL_REDUCE, LEASEHOLD_F32, LEASEHOLD_SUM, 0, {buffer, 0, 8, 0, 1}, none},
        {LEASEHOLD_ALL_REDUCE, LEASEHOLD_F32, LEASEHOLD_SUM, 0, half, all},
        {LEASEHOLD_ALL_REDUCE, LEASEHOLD_F32, LEASEHOLD_SUM, 0, part(buffer, 4, 8), part(buffer, 0, 8)},
    };
    for (i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        int status = leasehold_comm_call(comm, stream, &wrong[i], 1, NULL);
        if (status != LEASEHOLD_INVALID_ARGUMENT) {
            fprintf(stderr, "call %zu: %d: %s\n", i, status, leasehold_last_error());
            exit(1);
        }
    }
    INVALID(leasehold_comm_call(comm, stream, wrong, SIZE_MAX, NULL));
    /* Of two calls one is right, and neither is made. */
    {
        const leasehold_collective two[2] = {{LEASEHOLD_ALL_REDUCE, LEASEHOLD_F32, LEASEHOLD_SUM, 0, half, none}, wrong[0]};
        INVALID(leasehold_comm_call(comm, stream, two, 2, NULL));
    }
    INVALID(leasehold_comm_shrink(comm, &own, 1, &made));
    {
        leasehold_comm_desc desc = {sizeof desc, "mute", SECONDS, LEASEHOLD_COMM_NO_SENDS, 0};
        leasehold_collective exchange = {LEASEHOLD_ALL_TO_ALL, LEASEHOLD_F32, 0, 0, half, part(buffer, BYTES / 2, BYTES / 2)};
        OK(leasehold_comm_create(world, runtime, &desc, &made));
        IS(LEASEHOLD_INVALID_STATE, leasehold_comm_call(made, stream, &exchange, 1, NULL));
        OK(leasehold_comm_call(comm, stream, &exchange, 1, NULL));
        OK(leasehold_comm_release(made));
    }
    OK(leasehold_comm_shrink(comm, &other, 1, &made));
    OK(leasehold_comm_release(made));
}

/* A communicator that was ended. */
static void ended(void) {
    leasehold_collective barrier = {.call = LEASEHOLD_BARRIER};
    leasehold_comm made;
    int status;
    OK(leasehold_comm_split(comm, 3, 0, &made));
    OK(leasehold_comm_abort(made, "of a test"));
    IS(LEASEHOLD_FAILED, leasehold_comm_call(made, stream, &barrier, 1, NULL));
    OK(leasehold_comm_failure(made, &status));
    if (status != LEASEHOLD_FAILED || strstr(leasehold_last_error(), "of a test") == NULL) {
        fprintf(stderr, "the failure: %d: %s\n", status, leasehold_last_error());
        exit(1);
    }
    OK(leasehold_comm_release(made));
    INVALID(leasehold_comm_release(made));
    OK(leasehold_comm_call(comm, stream, &barrier, 1, NULL));
    OK(leasehold_stream_synchronize(stream, 10 * SECONDS));
}

int main(int argc, char **argv) {
    uint64_t all[6];
    int i, bit;
    OK(leasehold_device_open(argc > 1 ? argv[1] : "cpu:0", NULL, &device));
    OK(leasehold_runtime_open(device, &runtime));
    OK(leasehold_stream_create(runtime, NULL, &stream));
    OK(leasehold_buffer_alloc(stream, BYTES, &buffer));
    OK(leasehold_stream_fill(stream, part(buffer, 0, BYTES), 0, 1, NULL));
    OK(leasehold_world_open_threads(1, &world));
    OK(leasehold_comm_create(world, runtime, NULL, &comm));
    all[0] = device;
    all[1] = runtime;
    all[2] = stream;
    all[3] = buffer;
    all[4] = world;
    all[5] = comm;
    wrong_handles(0);
    wrong_handles(UINT64_MAX);
    for (i = 0; i < 6; i++) {
        wrong_handles(all[i]);
        for (bit = 0; bit < 64; bit += 7) {
            wrong_handles(all[i] ^ (uint64_t)1 << bit);
        }
    }
    null_pointers();
    worlds();
    descriptions();
    calls();
    ended();
    OK(leasehold_comm_release(comm));
    OK(leasehold_world_close(world, 10 * SECONDS));
    INVALID(leasehold_world_close(world, 0));
    OK(leasehold_buffer_release(buffer));
    OK(leasehold_stream_release(stream));
    OK(leasehold_runtime_close(runtime, 10 * SECONDS));
    OK(leasehold_device_close(device));
    printf("ok\n");
    return 0;
}
