/* A pool sleeps and wakes while others take all of the memory in between and free it again, under a budget and up to the device's own
 * limit: a resumption takes back what lies free. One that fails loses nothing.
 */
#include "leasehold.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((size_t)1 << 20)
#define WEIGHTS 5
#define GUESTS 256

static leasehold_device device;

static void check(int status, const char *what, int line) {
    if (status != LEASEHOLD_OK) {
        char text[4096];
        leasehold_error_text(text, sizeof text);
        fprintf(stderr, "line %d: %s: %d %s\n", line, what, status, text);
        exit(1);
    }
}
#define CHECK(call) check(call, #call, __LINE__)
#define EXPECT(condition)                                                                            \
    do {                                                                                             \
        if (!(condition)) {                                                                          \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                                  \
            exit(1);                                                                                 \
        }                                                                                            \
    } while (0)

/* Uses a block at both of its ends. */
static void use(uintptr_t stream, void *block, uint8_t byte, size_t bytes) {
    CHECK(leasehold_sim_fill(device, stream, block, byte, 5000));
    CHECK(leasehold_sim_fill(device, stream, (char *)block + bytes - 5000, byte, 5000));
}

/* Takes all that there is, of the main memory or of a pool, and uses it. */
static size_t fill_up(leasehold_pool pool, size_t bytes, uintptr_t stream, void **guests) {
    size_t count = 0;
    for (; count < GUESTS; count++) {
        int status = pool == 0 ? leasehold_malloc(device, bytes, stream, &guests[count])
                               : leasehold_pool_malloc(pool, bytes, stream, &guests[count]);
        if (status != LEASEHOLD_OK) {
            EXPECT(status == LEASEHOLD_OUT_OF_MEMORY);
            break;
        }
        use(stream, guests[count], 0xee, bytes);
    }
    EXPECT(count > 0 && count < GUESTS);
    return count;
}

static void free_all(void **guests, size_t count) {
    while (count > 0) {
        CHECK(leasehold_free(device, guests[--count]));
    }
}

static void sleep_and_wake(uint64_t budget, uint32_t flags, uint32_t keep) {
    leasehold_device_options options = {sizeof options, budget, LEASEHOLD_POLICY_BALANCED, 0, 0};
    leasehold_pool_options settings = {sizeof settings, "weights", LEASEHOLD_POLICY_BALANCED, LEASEHOLD_POOL_SUSPENDABLE};
    leasehold_pool_options movable = {sizeof movable, "cache", LEASEHOLD_POLICY_BALANCED, LEASEHOLD_POOL_MOVABLE};
    leasehold_pool pool, cache;
    uintptr_t a, b;
    void *weights[WEIGHTS], *guests[GUESTS], *block;
    size_t bytes = 13 * MIB, i, count;
    uint64_t freed;
    int round;

    settings.flags |= flags;
    CHECK(leasehold_device_open("sim-cuda:0", &options, &device));
    CHECK(leasehold_sim_stream(device, 0, &a));
    CHECK(leasehold_sim_stream(device, 0, &b));
    CHECK(leasehold_pool_create(device, &settings, &pool));
    CHECK(leasehold_pool_create(device, &movable, &cache));
    for (i = 0; i < WEIGHTS; i++) {
        CHECK(leasehold_pool_malloc(pool, bytes, a, &weights[i]));
    }
    for (round = 0; round < 8; round++) {
        for (i = 0; i < WEIGHTS; i++) {
            use(a, weights[i], (uint8_t)(round * WEIGHTS + i), bytes);
        }
        /* A block that comes and goes within the pool. */
        CHECK(leasehold_pool_malloc(pool, (size_t)(1 + round) * 300000, a, &block));
        CHECK(leasehold_free(device, block));
        CHECK(leasehold_pool_suspend(pool, keep, &freed));
        EXPECT(freed >= WEIGHTS * bytes);

        /* The main memory and a pool take all in turns, in blocks of other sizes, on both streams. */
        count = fill_up(0, (size_t)(4 + round % 4) * 2 * MIB + 10000, round % 2 ? a : b, guests);
        if (round % 3 == 0) {
            /* Live blocks have it all: the pool sleeps on, and nothing is lost. */
            int status = leasehold_pool_resume(pool);
            EXPECT(status == LEASEHOLD_OUT_OF_MEMORY || status == LEASEHOLD_OVER_BUDGET);
            EXPECT(leasehold_pool_malloc(pool, 10, a, &block) == LEASEHOLD_SUSPENDED);
            EXPECT(leasehold_pool_release(pool) == LEASEHOLD_SUSPENDED);
        }
        free_all(guests, count);
        count = fill_up(cache, (size_t)(2 + round % 5) * 3 * MIB, round % 2 ? b : a, guests);
        free_all(guests, count);
        if (round % 4 == 1) {
            count = fill_up(0, 11 * MIB, b, guests);
            /* Half of it stays. */
            free_all(guests + count / 4, count - count / 4);
            count /= 4;
        } else {
            count = 0;
        }

        CHECK(leasehold_pool_resume(pool));
        for (i = 0; i < WEIGHTS; i++) {
            uint8_t found[2] = {0, 0};
            if (keep == 0) {
                use(a, weights[i], 1, bytes);
                continue;
            }
            CHECK(leasehold_sim_read(device, a, &found[0], weights[i], 1));
            CHECK(leasehold_sim_read(device, a, &found[1], (char *)weights[i] + bytes - 1, 1));
            EXPECT(found[0] == (uint8_t)(round * WEIGHTS + i) && found[1] == found[0]);
        }
        free_all(guests, count);
    }

    /* A pool that sleeps without blocks is let go, also while others have all memory. */
    CHECK(leasehold_pool_suspend(pool, keep, NULL));
    count = fill_up(0, 10 * MIB, b, guests);
    EXPECT(leasehold_pool_release(pool) == LEASEHOLD_SUSPENDED);
    free_all(weights, WEIGHTS);
    CHECK(leasehold_pool_release(pool));
    free_all(guests, count);
    CHECK(leasehold_pool_release(cache));
    CHECK(leasehold_device_synchronize(device));
    CHECK(leasehold_trim(device, 0, NULL));
    {
        leasehold_stats stats;
        stats.size = sizeof stats;
        CHECK(leasehold_stats_get(device, &stats));
        EXPECT(stats.reserved_bytes == 0 && stats.blocks == 0);
    }
    CHECK(leasehold_stream_end(device, a));
    CHECK(leasehold_stream_end(device, b));
    CHECK(leasehold_sim_stream_destroy(device, a));
    CHECK(leasehold_sim_stream_destroy(device, b));
    CHECK(leasehold_device_close(device));
}

int main(void) {
    static const uint64_t budgets[] = {120 * MIB, 0};
    size_t i;
    for (i = 0; i < 2; i++) {
        sleep_and_wake(budgets[i], 0, LEASEHOLD_SUSPEND_KEEP);
        sleep_and_wake(budgets[i], LEASEHOLD_POOL_MOVABLE, LEASEHOLD_SUSPEND_KEEP);
        sleep_and_wake(budgets[i], 0, 0);
    }
    {
        /* A suspension copies all of a range, also what nobody wrote. */
        static const char unwritten[] = "read of memory that nobody wrote";
        char *races, *line;
        CHECK(leasehold_sim_races(&races));
        for (line = strtok(races, "\n"); line != NULL; line = strtok(NULL, "\n")) {
            if (strncmp(line, unwritten, sizeof unwritten - 1) != 0) {
                fprintf(stderr, "%s\n", line);
                return 1;
            }
        }
        leasehold_text_free(races);
    }
    puts("ok");
    return 0;
}
