/* The allocator from C: memory of a device by size and stream, a pool, a report of exhausted memory.
 *
 *     allocator [cpu:0 | cuda:0 | cuda:1 …]
 *
 * On a CUDA device a stream is a cudaStream_t as an integer; this program uses the legacy default stream, 0, or a simulated stream if it
 * is compiled with -DLEASEHOLD_SIM and linked to libleasehold_capi_sim.
 */
#include "leasehold.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((size_t)1 << 20)

/* Ends the program after a failure, with its text. */
static void check(int status, const char *what) {
    if (status != LEASEHOLD_OK) {
        char text[4096];
        leasehold_error_text(text, sizeof text);
        fprintf(stderr, "%s: %s (%d)\n", what, text, status);
        exit(1);
    }
}

static leasehold_stats stats_of(leasehold_device device) {
    leasehold_stats stats;
    stats.size = sizeof stats;
    check(leasehold_stats_get(device, &stats), "statistics");
    return stats;
}

static void count(void *context, const leasehold_block *block) {
    if (block->state == LEASEHOLD_BLOCK_LIVE) {
        *(uint64_t *)context += block->requested_bytes;
    }
}

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "cpu:0";
    leasehold_device_options options = {sizeof options, 64 * MIB, LEASEHOLD_POLICY_BALANCED, 16, 0};
    leasehold_device device;
    leasehold_device_info info;
    leasehold_stats stats;
    uintptr_t stream = 0, other = 0;
    void *blocks[16] = {NULL}, *block, *base;
    uint64_t live = 0, freed;
    size_t i, bytes;
    char *json;

    check(leasehold_device_open(name, &options, &device), name);
    info.size = sizeof info;
    check(leasehold_device_describe(device, &info), "describe");
    printf("%s: %s, %" PRIu64 " MiB\n", name, info.name, info.total_bytes >> 20);
#ifdef LEASEHOLD_SIM
    if (strncmp(name, "sim-", 4) == 0) {
        check(leasehold_sim_stream(device, 0, &stream), "stream");
        check(leasehold_sim_stream(device, 0, &other), "stream");
    }
#endif

    /* Blocks come and go without a call of the driver, on one stream. */
    for (i = 0; i < 16; i++) {
        check(leasehold_malloc(device, (i + 1) * 100000, stream, &blocks[i]), "malloc");
    }
    for (i = 0; i < 16; i += 2) {
        /* The other stream uses it too; its memory waits for both. */
        check(leasehold_record_stream(device, blocks[i], other), "record_stream");
        check(leasehold_free(device, blocks[i]), "free");
    }
    check(leasehold_block_find(device, (char *)blocks[3] + 1000, &base, &bytes, NULL), "find");
    if (base != blocks[3] || bytes != 400000) {
        fprintf(stderr, "another block was found\n");
        return 1;
    }
    check(leasehold_visit_blocks(device, count, &live), "visit");
    stats = stats_of(device);
    printf("%" PRIu64 " blocks of %" PRIu64 " bytes, %" PRIu64 " reserved\n", stats.blocks, stats.allocated_bytes, stats.reserved_bytes);
    if (live != stats.allocated_bytes || stats.blocks != 8) {
        fprintf(stderr, "the walk found %" PRIu64 " bytes\n", live);
        return 1;
    }

    /* A wrong call is a status with a text. */
    if (leasehold_free(device, blocks[0]) != LEASEHOLD_INVALID_ARGUMENT) {
        fprintf(stderr, "a block was freed twice\n");
        return 1;
    }
    printf("twice: %s\n", leasehold_last_error());

    /* Exhausted memory has a report. */
    check(leasehold_block_set_name(device, blocks[15], "the largest"), "name");
    if (leasehold_malloc(device, 63 * MIB, stream, &block) != LEASEHOLD_OUT_OF_MEMORY) {
        fprintf(stderr, "the budget was not kept\n");
        return 1;
    }
    printf("%s\n", leasehold_last_error());

    /* Memory that can be suspended, where addresses and memory are separate. */
    {
        leasehold_pool_options settings = {sizeof settings, "weights", LEASEHOLD_POLICY_BALANCED, LEASEHOLD_POOL_SUSPENDABLE};
        leasehold_pool pool;
        int status = leasehold_pool_create(device, &settings, &pool);
        if (status == LEASEHOLD_OK) {
            check(leasehold_pool_malloc(pool, 20 * MIB, stream, &block), "pool");
            check(leasehold_pool_suspend(pool, 0, &freed), "suspend");
            printf("suspended: %" PRIu64 " MiB went\n", freed >> 20);
            check(leasehold_pool_resume(pool), "resume");
            check(leasehold_free(device, block), "free");
            check(leasehold_pool_release(pool), "release");
        } else if (status != LEASEHOLD_UNSUPPORTED) {
            check(status, "pool");
        }
    }

    check(leasehold_snapshot(device, &json), "snapshot");
    printf("a snapshot of %zu bytes\n", strlen(json));
    leasehold_text_free(json);
    check(leasehold_report(device, &json), "report");
    printf("a report of %zu bytes\n", strlen(json));
    leasehold_text_free(json);

    for (i = 1; i < 16; i += 2) {
        check(leasehold_free(device, blocks[i]), "free");
    }
    check(leasehold_device_synchronize(device), "synchronize");
    check(leasehold_trim(device, 0, &freed), "trim");
    stats = stats_of(device);
    if (stats.blocks != 0 || stats.reserved_bytes != 0) {
        fprintf(stderr, "%" PRIu64 " bytes are left\n", stats.reserved_bytes);
        return 1;
    }
#ifdef LEASEHOLD_SIM
    if (strncmp(name, "sim-", 4) == 0) {
        check(leasehold_stream_end(device, stream), "end");
        check(leasehold_stream_end(device, other), "end");
        check(leasehold_sim_stream_destroy(device, stream), "destroy");
        check(leasehold_sim_stream_destroy(device, other), "destroy");
    }
#endif
    check(leasehold_device_close(device), "close");
    printf("ok\n");
    return 0;
}
