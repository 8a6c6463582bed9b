/* Random calls of leasehold.h by threads that share devices, pools, streams and blocks.
 *
 *     fuzz [CALLS [THREADS [SEED [DEVICE]]]]
 *
 * Devices and pools are closed while others use them, pools are suspended and resumed with live blocks, streams end and are destroyed,
 * handles and addresses are forged, budgets change. A block that was given keeps its contents until it is freed, and freeing it works.
 * Prints "ok" and numbers, or what is wrong, with status 1. The simulated devices need a library that has them (-DLEASEHOLD_SIM).
 */
#define _GNU_SOURCE
#include "leasehold.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef LEASEHOLD_SIM
#include "races.h"
#endif

enum { DEVICES = 3, SLOTS = 200, SMALL = 12, POOLS = 6, STREAMS = 4, MOST_THREADS = 64 };

typedef struct {
    pthread_mutex_t lock;
    uint8_t *at; /* NULL: no block */
    size_t bytes;
    leasehold_device owner;
    leasehold_pool pool;
    int device, stream; /* their places */
    uint8_t value;
} slot;

static slot slots[SLOTS];
/* The first device has most blocks; the others are closed and opened again. */
static struct {
    atomic_ullong handle;
    pthread_mutex_t lock; /* of who opens it */
    struct {
        pthread_rwlock_t lock; /* a writer destroys it */
        uintptr_t handle;
    } streams[STREAMS];
} devices[DEVICES];
/* Readers use blocks of the pool, a writer suspends it. Any thread may release it without the lock. */
static struct {
    pthread_rwlock_t lock;
    atomic_ullong handle;
    int suspended;
} pools[POOLS];

static const char *name = "cpu:0";
static int simulated;
static uint64_t budget_of_calls;
static atomic_ullong calls, wrong, statuses[16], closed, released, resumed, destroyed;

static uint64_t next(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state >> 11;
}

static void fail(const char *what, int status) {
    char text[600];
    leasehold_error_text(text, sizeof text);
    if (atomic_fetch_add(&wrong, 1) < 20) {
        fprintf(stderr, "wrong: %s: status %d, last error: %s\n", what, status, text);
    }
}

/* Counts a call. `allowed`: a bit for each status that is right. */
static int note(int status, unsigned allowed, const char *what) {
    atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
    if (status < 0 || status > 15 || (allowed >> status & 1) == 0) {
        fail(what, status);
        return status;
    }
    atomic_fetch_add_explicit(&statuses[status], 1, memory_order_relaxed);
    if (status != LEASEHOLD_OK) {
        char text[64];
        const char *last = leasehold_last_error();
        size_t length = leasehold_error_text(text, sizeof text);
        if (length == 0 || length != strlen(last) || strncmp(text, last, strlen(text)) != 0) {
            fail(what, status);
        }
    }
    return status;
}

#define BIT(status) (1u << LEASEHOLD_##status)
#define FINE BIT(OK)
#define GONE (FINE | BIT(INVALID_ARGUMENT))
#define TAKES (GONE | BIT(OUT_OF_MEMORY) | BIT(OVER_BUDGET) | BIT(SUSPENDED))
#define CALL(allowed, function, ...) note(leasehold_##function(__VA_ARGS__), allowed, #function)

/* The parts of a block that are written and checked: all of a small one, both ends of others. */
#define PART 512

static void write_part(slot *s, uintptr_t stream, size_t from, size_t bytes) {
#ifdef LEASEHOLD_SIM
    if (simulated) {
        CALL(FINE, sim_fill, s->owner, stream, s->at + from, s->value, bytes);
        return;
    }
#endif
    (void)stream;
    memset(s->at + from, s->value, bytes);
}

static void write_block(slot *s, uintptr_t stream) {
    write_part(s, stream, 0, s->bytes < PART ? s->bytes : PART);
    if (s->bytes > PART) {
        write_part(s, stream, s->bytes - PART, PART);
    }
}

static void check_part(slot *s, uintptr_t stream, size_t from, size_t bytes) {
    uint8_t copy[PART];
    size_t i;
#ifdef LEASEHOLD_SIM
    if (simulated) {
        CALL(FINE, sim_read, s->owner, stream, copy, s->at + from, bytes);
    } else
#endif
    {
        memcpy(copy, s->at + from, bytes);
    }
    (void)stream;
    for (i = 0; i < bytes; i++) {
        if (copy[i] != s->value) {
            fprintf(stderr, "block %p of %zu bytes: %d at %zu, not %d\n", (void *)s->at, s->bytes, copy[i], from + i, s->value);
            atomic_fetch_add(&wrong, 1);
            return;
        }
    }
}

static void check_block(slot *s, uintptr_t stream) {
    check_part(s, stream, 0, s->bytes < PART ? s->bytes : PART);
    if (s->bytes > PART) {
        check_part(s, stream, s->bytes - PART, PART);
    }
}

static int filter(void *context, uintptr_t stream) {
    (void)context;
    return stream / 256 % 3 == 0;
}

static void visitor(void *context, const leasehold_block *block) {
    uint64_t *state = context;
    if (next(state) % 64 == 0) {
        leasehold_stats stats;
        stats.size = sizeof stats;
        CALL(GONE, block_find, devices[0].handle, (const void *)(uintptr_t)block->address, NULL, NULL, NULL);
        CALL(GONE, stats_get, devices[0].handle, &stats);
    }
}

/* The place of a pool with this handle, or -1. */
static int place_of(leasehold_pool pool) {
    int i;
    for (i = 0; pool != 0 && i < POOLS; i++) {
        if (pools[i].handle == pool) {
            return i;
        }
    }
    return -1;
}

static void open_device(int at, uint64_t *state) {
    leasehold_device_options options = {sizeof options, 0, (uint32_t)(next(state) % 3), (uint32_t)(next(state) % 3 * 100), 0};
    leasehold_device device = 0;
    int i;
    if (CALL(FINE, device_open, at == 2 && simulated ? "sim-cuda:1" : name, &options, &device) != LEASEHOLD_OK) {
        return;
    }
    for (i = 0; i < STREAMS; i++) {
#ifdef LEASEHOLD_SIM
        if (simulated) {
            uintptr_t *handle = &devices[at].streams[i].handle;
            if (i != 0 && *handle != 0) {
                CALL(FINE, stream_end, device, *handle);
                CALL(FINE, sim_stream_destroy, device, *handle);
            }
            CALL(FINE, sim_stream, device, i == 0, handle);
        }
#endif
    }
    devices[at].handle = device;
}

static void make_pool(int at, uint64_t *state) {
    leasehold_pool_options options = {sizeof options, "pool <b>\"'&", (uint32_t)(next(state) % 3), (uint32_t)(next(state) % 4)};
    leasehold_pool pool = 0;
    /* The last pool is one of a device that is closed at times. */
    if (CALL(GONE | BIT(UNSUPPORTED), pool_create, devices[at == POOLS - 1].handle, &options, &pool) == LEASEHOLD_OK) {
        pools[at].suspended = 0;
        pools[at].handle = pool;
    }
}

/* Frees a block, under its lock. It is the caller's, so this cannot fail. */
static void free_block(slot *s) {
    CALL(FINE, free, s->owner, s->at);
    s->at = NULL;
}

static void take_block(slot *s, uint64_t *state) {
    static const size_t sizes[] = {1, 8, 255, 256, 257, 600, 4096, 5000, 65536, 300000, 1 << 20, (1 << 20) + 1, 2 << 20, 5 << 20};
    long at = s - slots;
    int device = at < SLOTS - SMALL ? 0 : 1 + (int)(at % (DEVICES - 1)), pool = -1, status;
    void *block = NULL;
    if (device == 0) {
        pool = (int)(next(state) % (POOLS + 4)) - 4;
        device = pool == POOLS - 1;
    }
    s->device = device;
    s->owner = devices[device].handle;
    s->bytes = sizes[next(state) % (device == 0 ? 14 : 9)];
    s->stream = (int)(next(state) % STREAMS);
    s->value = (uint8_t)next(state);
    pthread_rwlock_rdlock(&devices[device].streams[s->stream].lock);
    if (pool >= 0) {
        pthread_rwlock_rdlock(&pools[pool].lock);
        s->pool = pools[pool].handle;
        status = CALL(TAKES, pool_malloc, s->pool, s->bytes, devices[device].streams[s->stream].handle, &block);
        if (status == LEASEHOLD_OK) {
            s->at = block;
            /* The block keeps its device open. */
            s->owner = devices[device].handle;
            if (pools[pool].suspended && pools[pool].handle == s->pool) {
                fail("a block of a suspended pool", status);
            } else {
                write_block(s, devices[device].streams[s->stream].handle);
            }
        }
        pthread_rwlock_unlock(&pools[pool].lock);
    } else if (CALL(TAKES, malloc, s->owner, s->bytes, devices[device].streams[s->stream].handle, &block) == LEASEHOLD_OK) {
        void *base = NULL;
        size_t bytes = 0;
        s->at = block;
        CALL(FINE, block_find, s->owner, s->at + s->bytes / 2, &base, &bytes, &s->pool);
        if (base != s->at || bytes != s->bytes) {
            fail("block_find", 0);
        }
        if (s->pool != 0) {
            /* A pool took it that another thread may suspend. */
            free_block(s);
        } else {
            write_block(s, devices[device].streams[s->stream].handle);
        }
    }
    pthread_rwlock_unlock(&devices[device].streams[s->stream].lock);
}

static void use_block(slot *s, uint64_t *state) {
    int device = s->device, pool = place_of(s->pool), usable = 1;
    uintptr_t stream;
    pthread_rwlock_rdlock(&devices[device].streams[s->stream].lock);
    stream = devices[device].streams[s->stream].handle;
    if (pool >= 0) {
        pthread_rwlock_rdlock(&pools[pool].lock);
        usable = pools[pool].handle != s->pool || !pools[pool].suspended;
    }
    switch (next(state) % 6) {
    case 0:
        CALL(FINE, block_set_name, s->owner, s->at, "a name");
        CALL(BIT(INVALID_ARGUMENT), block_set_name, s->owner, s->at, "\xff\xfe");
        break;
    case 1:
        if (usable) {
            s->value = (uint8_t)next(state);
            write_block(s, stream);
        }
        break;
    case 2: {
        int other = (int)(next(state) % STREAMS);
        if (pthread_rwlock_tryrdlock(&devices[device].streams[other].lock) == 0) {
            uintptr_t second = devices[device].streams[other].handle;
            CALL(FINE, record_stream, s->owner, s->at, second);
#ifdef LEASEHOLD_SIM
            if (simulated && usable) {
                CALL(FINE, sim_order, s->owner, stream, second);
                write_block(s, second);
                CALL(FINE, sim_order, s->owner, second, stream);
            }
#endif
            pthread_rwlock_unlock(&devices[device].streams[other].lock);
        }
        break;
    }
    default:
        if (usable) {
            check_block(s, stream);
        }
        CALL(BIT(INVALID_ARGUMENT), free, s->owner, s->at + 1);
        {
            void *block = s->at;
            leasehold_device owner = s->owner;
            free_block(s);
            /* Another thread may have the address again on the same device. */
            if (simulated == 0 && next(state) % 64 == 0) {
                CALL(BIT(INVALID_ARGUMENT), free, owner ^ (1ull << 40), block);
            }
        }
        break;
    }
    if (pool >= 0) {
        pthread_rwlock_unlock(&pools[pool].lock);
    }
    pthread_rwlock_unlock(&devices[device].streams[s->stream].lock);
}

/* Suspends a pool, or resumes it. */
static void turn_pool(int at) {
    uint64_t freed = 0;
    int status;
    pthread_rwlock_wrlock(&pools[at].lock);
    if (pools[at].suspended) {
        status = CALL(GONE | BIT(OUT_OF_MEMORY) | BIT(OVER_BUDGET), pool_resume, pools[at].handle);
        resumed += status == LEASEHOLD_OK;
        /* One that was released has no blocks. */
        pools[at].suspended = status != LEASEHOLD_OK && status != LEASEHOLD_INVALID_ARGUMENT;
    } else {
        status = CALL(GONE | BIT(UNSUPPORTED) | BIT(OUT_OF_MEMORY), pool_suspend, pools[at].handle, LEASEHOLD_SUSPEND_KEEP, &freed);
        pools[at].suspended = status == LEASEHOLD_OK;
    }
    pthread_rwlock_unlock(&pools[at].lock);
}

/* Releases a pool, without the lock, and makes another one. */
static void replace_pool(int at, uint64_t *state) {
    leasehold_pool pool = pools[at].handle;
    int status = CALL(GONE | BIT(SUSPENDED), pool_release, pool);
    released += status == LEASEHOLD_OK;
    if (status != LEASEHOLD_SUSPENDED) {
        pthread_rwlock_wrlock(&pools[at].lock);
        if (pools[at].handle == pool && CALL(FINE | BIT(INVALID_STATE) | BIT(INVALID_ARGUMENT), pool_end, pool) == LEASEHOLD_INVALID_ARGUMENT) {
            make_pool(at, state);
        }
        pthread_rwlock_unlock(&pools[at].lock);
    }
}

/* Closes a device, and opens it again if nothing of it was held. */
static void close_device(int at, uint64_t *state) {
    leasehold_device device = devices[at].handle;
    if (CALL(GONE | BIT(IN_USE), device_close, device) == LEASEHOLD_OK) {
        int i;
        closed++;
        CALL(BIT(INVALID_ARGUMENT), device_close, device);
        pthread_mutex_lock(&devices[at].lock);
        for (i = 0; i < STREAMS; i++) {
            pthread_rwlock_wrlock(&devices[at].streams[i].lock);
        }
        open_device(at, state);
        for (i = 0; i < STREAMS; i++) {
            pthread_rwlock_unlock(&devices[at].streams[i].lock);
        }
        pthread_mutex_unlock(&devices[at].lock);
    }
}

#ifdef LEASEHOLD_SIM
/* Destroys a stream, also one whose blocks are held, and makes another one. */
static void replace_stream(int device, int at) {
    if (at == 0 || pthread_rwlock_trywrlock(&devices[device].streams[at].lock) != 0) {
        return;
    }
    leasehold_device handle = devices[device].handle;
    uintptr_t old = devices[device].streams[at].handle;
    /* Later work on its blocks comes from other streams. */
    if (CALL(GONE, device_synchronize, handle) == LEASEHOLD_OK && CALL(GONE, stream_end, handle, old) == LEASEHOLD_OK &&
        CALL(GONE, sim_stream_destroy, handle, old) == LEASEHOLD_OK) {
        destroyed++;
        CALL(GONE, sim_stream, handle, 0, &devices[device].streams[at].handle);
    }
    pthread_rwlock_unlock(&devices[device].streams[at].lock);
}
#endif

static void forge(uint64_t *state) {
    leasehold_device device = devices[next(state) % DEVICES].handle;
    uint64_t handle = next(state) % 4 != 0 ? next(state) << 40 ^ next(state) : device ^ 1ull << next(state) % 64;
    uint64_t small = next(state) % (1 << 16);
    void *block;
    int i;
    for (i = 0; i < DEVICES; i++) {
        if (handle == devices[i].handle || place_of(handle) >= 0) {
            return;
        }
    }
    /* The flipped bit may make another generation of a device, which is open nowhere. */
    CALL(BIT(INVALID_ARGUMENT), malloc, handle, 10, 0, &block);
    CALL(BIT(INVALID_ARGUMENT), free, handle, (void *)(uintptr_t)small);
    CALL(BIT(INVALID_ARGUMENT), pool_malloc, handle, 10, 0, &block);
    CALL(BIT(INVALID_ARGUMENT), device_close, handle);
    CALL(BIT(INVALID_ARGUMENT), trim, handle, 0, NULL);
    CALL(BIT(INVALID_ARGUMENT), pool_resume, handle);
    CALL(BIT(INVALID_ARGUMENT), pool_release, handle);
    CALL(BIT(INVALID_ARGUMENT), pool_suspend, handle, (uint32_t)next(state), NULL);
    CALL(BIT(INVALID_ARGUMENT), pool_begin, handle, filter, NULL);
    CALL(BIT(INVALID_ARGUMENT), set_budget, handle, 1);
    CALL(GONE, free, device, (void *)(uintptr_t)small);
    CALL(GONE, record_stream, device, (void *)(uintptr_t)(small | 1), 0);
    CALL(BIT(INVALID_ARGUMENT), malloc, device, 10, 0, NULL);
    CALL(GONE, malloc, device, 0, 0, &block);
    CALL(TAKES & ~FINE, malloc, device, SIZE_MAX - small, 0, &block);
    CALL(TAKES & ~FINE, malloc, device, (size_t)1 << (next(state) % 16 + 47), 0, &block);
    CALL(BIT(INVALID_ARGUMENT), block_find, device, (void *)(uintptr_t)small, NULL, NULL, NULL);
}

static void describe(uint64_t *state) {
    leasehold_device device = devices[next(state) % DEVICES].handle;
    leasehold_device_info info;
    leasehold_stats stats;
    uint64_t number;
    char *text = NULL;
    info.size = sizeof info;
    stats.size = next(state) % 2 != 0 ? sizeof stats : 16 + next(state) % 100;
    CALL(GONE, device_describe, device, &info);
    CALL(GONE, stats_get, device, &stats);
    CALL(GONE, largest_free, device, &number);
    if (next(state) % 16 == 0) {
        if (CALL(GONE, snapshot, device, &text) == LEASEHOLD_OK) {
            leasehold_text_free(text);
        }
        if (CALL(GONE, report, device, &text) == LEASEHOLD_OK) {
            leasehold_text_free(text);
        }
        CALL(GONE, visit_blocks, device, visitor, state);
    }
}

static void *work(void *argument) {
    uint64_t state = (uint64_t)(uintptr_t)argument * 0x9e3779b97f4a7c15u + 1;
    while (atomic_load_explicit(&calls, memory_order_relaxed) < budget_of_calls && wrong == 0) {
        /* Most calls are about blocks; what is rare takes long. */
        uint64_t what = next(&state) % 4000 % (next(&state) % 4 == 0 ? 1000 : 900);
        int pool = (int)(next(&state) % POOLS);
        if (what < 900) {
            slot *s = &slots[what < 100 ? SLOTS - 1 - next(&state) % SMALL : next(&state) % SLOTS];
            pthread_mutex_lock(&s->lock);
            if (s->at == NULL) {
                take_block(s, &state);
            } else {
                use_block(s, &state);
            }
            pthread_mutex_unlock(&s->lock);
        } else if (what < 910) {
            turn_pool(pool);
        } else if (what < 915) {
            replace_pool(pool, &state);
        } else if (what < 935) {
            /* Sometimes the blocks of a small device are freed first. */
            int device = 1 + (int)(next(&state) % (DEVICES - 1)), i;
            for (i = SLOTS - SMALL; i < SLOTS && what % 2; i++) {
                pthread_mutex_lock(&slots[i].lock);
                if (slots[i].at != NULL && slots[i].device == device) {
                    free_block(&slots[i]);
                }
                pthread_mutex_unlock(&slots[i].lock);
            }
            close_device(device, &state);
        } else if (what < 937) {
            close_device(0, &state);
        } else if (what < 950) {
            CALL(GONE, trim, devices[next(&state) % DEVICES].handle, next(&state) % 2 << 20, NULL);
            CALL(GONE, pool_trim, pools[pool].handle, 0, NULL);
        } else if (what < 960) {
            CALL(GONE | BIT(INVALID_STATE), pool_begin, pools[pool].handle, next(&state) % 2 ? filter : NULL, NULL);
            CALL(GONE | BIT(INVALID_STATE), pool_end, pools[next(&state) % POOLS].handle);
        } else if (what < 970) {
            forge(&state);
        } else if (what < 985) {
            describe(&state);
        } else if (what < 990) {
            uint64_t budget = next(&state) % 3 != 0 ? 0 : next(&state) % 400 << 20;
            CALL(GONE, set_budget, devices[next(&state) % DEVICES].handle, budget);
            CALL(GONE, stats_reset_peaks, devices[0].handle);
        } else if (what < 993) {
            CALL(GONE, device_synchronize, devices[next(&state) % DEVICES].handle);
        }
#ifdef LEASEHOLD_SIM
        else if (simulated) {
            replace_stream((int)(next(&state) % DEVICES), (int)(next(&state) % STREAMS));
        }
#endif
    }
    return NULL;
}

static void finish(void) {
    leasehold_stats stats;
    int i;
    for (i = 0; i < DEVICES; i++) {
        CALL(GONE, set_budget, devices[i].handle, 0);
    }
    for (i = 0; i < POOLS; i++) {
        if (pools[i].suspended) {
            int status = CALL(GONE | BIT(OUT_OF_MEMORY), pool_resume, pools[i].handle);
            if (status == LEASEHOLD_OUT_OF_MEMORY) {
                /* Suspended pools and blocks have more than the device: some go first. */
                continue;
            }
            pools[i].suspended = 0;
        }
    }
    for (i = 0; i < SLOTS; i++) {
        if (slots[i].at != NULL) {
            int pool = place_of(slots[i].pool), device = slots[i].device;
            if (pool < 0 || !pools[pool].suspended) {
                check_block(&slots[i], devices[device].streams[slots[i].stream].handle);
            }
            free_block(&slots[i]);
        }
    }
    for (i = 0; i < POOLS; i++) {
        CALL(GONE, pool_release, pools[i].handle);
    }
    for (i = 0; i < DEVICES; i++) {
        CALL(FINE, device_synchronize, devices[i].handle);
        CALL(FINE, trim, devices[i].handle, 0, NULL);
        stats.size = sizeof stats;
        CALL(FINE, stats_get, devices[i].handle, &stats);
        if (stats.blocks != 0 || stats.allocated_bytes != 0 || stats.pools != 1 || stats.reserved_bytes != 0) {
            fprintf(stderr, "left: %llu blocks, %llu bytes, %llu pools, %llu reserved\n", (unsigned long long)stats.blocks,
                    (unsigned long long)stats.allocated_bytes, (unsigned long long)stats.pools, (unsigned long long)stats.reserved_bytes);
            wrong++;
        }
        CALL(FINE, device_close, devices[i].handle);
    }
}

int main(int argc, char **argv) {
    int threads = argc > 2 ? atoi(argv[2]) : 8, i, j;
    uint64_t seed = argc > 3 ? strtoull(argv[3], NULL, 10) : 1, state = seed + 1;
    pthread_t all[MOST_THREADS];
    budget_of_calls = argc > 1 ? strtoull(argv[1], NULL, 10) : 100000;
    name = argc > 4 ? argv[4] : name;
    simulated = strncmp(name, "sim-", 4) == 0;
    threads = threads > MOST_THREADS ? MOST_THREADS : threads;
    for (i = 0; i < SLOTS; i++) {
        pthread_mutex_init(&slots[i].lock, NULL);
    }
    for (i = 0; i < DEVICES; i++) {
        pthread_mutex_init(&devices[i].lock, NULL);
        for (j = 0; j < STREAMS; j++) {
            pthread_rwlock_init(&devices[i].streams[j].lock, NULL);
        }
        open_device(i, &state);
    }
    for (i = 0; i < POOLS; i++) {
        pthread_rwlock_init(&pools[i].lock, NULL);
        make_pool(i, &state);
    }
    for (i = 0; i < threads; i++) {
        pthread_create(&all[i], NULL, work, (void *)(uintptr_t)(seed * 100 + (uint64_t)i));
    }
    for (i = 0; i < threads; i++) {
        pthread_join(all[i], NULL);
    }
    finish();
#ifdef LEASEHOLD_SIM
    if (simulated) {
        wrong += races_found();
    }
#endif
    printf("%s: %llu calls, %llu devices closed, %llu pools released, %llu resumed, %llu streams destroyed; statuses", wrong == 0 ? "ok" : "wrong",
           (unsigned long long)calls, (unsigned long long)closed, (unsigned long long)released, (unsigned long long)resumed,
           (unsigned long long)destroyed);
    for (i = 0; i < 16; i++) {
        if (statuses[i] != 0) {
            printf(" %d:%llu", i, (unsigned long long)statuses[i]);
        }
    }
    printf("\n");
    return wrong != 0;
}
