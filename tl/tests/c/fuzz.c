/* Random calls of leasehold_memory.h from threads that come and go: fuzz [calls] [threads] [seed]. Addresses that are nobody's are used
 * wherever the header says that what is wrong is a counted no-op; blocks that are registered are real. Checked: every custom object and
 * tensor is destroyed once and only while it is alive, buffers can be written, depth is 1 in a new thread, nothing aborts. */
#define _GNU_SOURCE
#include "objects.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS 512
#define ALIVE 0x600dc0de600dc0deull
#define DEAD 0xdeadbeefdeadbeefull
typedef struct { _Atomic uint64_t state; uint64_t seed, pad[6]; } custom;

static _Atomic(void *) slots[SLOTS];      /* structs and vectors, by address only */
static _Atomic(void *) tensors[SLOTS];
static _Atomic(void *) customs[SLOTS];
static _Atomic uint64_t calls, made, destroyed, t_made, t_destroyed, threads_run;
static _Atomic int quiet;
static uint64_t budget = 1000000; /* calls of each lane */
static int width = 4;
static __thread uint64_t done;
static __thread uint64_t rng;
static __thread int nested;

static uint64_t next(void) { rng ^= rng << 13; rng ^= rng >> 7; rng ^= rng << 17; return rng * 0x2545F4914F6CDD1Dull >> 11; }
static uint64_t below(uint64_t n) { return next() % n; }
static void die(const char *what) { fprintf(stderr, "FAILED: %s\n", what); abort(); }
static void some_calls(int n);

static void custom_destructor(void *p) {
    custom *c = p;
    if (atomic_exchange(&c->state, DEAD) != ALIVE) die("a custom object destroyed twice, or one that never was");
    atomic_fetch_add(&destroyed, 1);
    if (nested < 3 && below(4) == 0) { nested++; some_calls((int)below(6)); nested--; }
    if (below(8)) free(c); else { memset(c, 0x5a, sizeof *c); free(c); }
}
typedef struct { _Atomic uint64_t state; tl_tensor_info info; } foreign;
static void tensor_destructor(OpaqueTensor *p) {
    foreign *f = (foreign *)p;
    if (atomic_exchange(&f->state, DEAD) != ALIVE) die("a tensor destroyed twice");
    atomic_fetch_add(&t_destroyed, 1);
    if (nested < 3 && below(8) == 0) { nested++; some_calls((int)below(4)); nested--; }
    free(f);
}
static int32_t describer(const OpaqueTensor *p, tl_tensor_info *i) {
    const foreign *f = (const foreign *)p;
    if (atomic_load(&((foreign *)f)->state) != ALIVE) die("a dead tensor described");
    if (nested < 3 && below(16) == 0) { nested++; some_calls((int)below(4)); nested--; }
    *i = f->info;
    return (int32_t)below(4);
}
static uint64_t hook_enter(void) { if (nested < 3 && below(8) == 0) { nested++; some_calls((int)below(4)); nested--; } return 77; }
static void hook_exit(uint64_t v) { if (v != 77) die("a scope hook's value"); if (nested < 3 && below(8) == 0) { nested++; some_calls((int)below(4)); nested--; } }

/* An address: somebody's, possibly long dead, or nobody's. */
static void *any(void) {
    switch (below(8)) {
    case 0: return (void *)(below(64) + 1);
    case 1: return (void *)(0xffff800000000000ull + below(1024) * 8);
    case 2: return NULL;
    case 3: return atomic_load(&tensors[below(SLOTS)]);
    case 4: return atomic_load(&customs[below(SLOTS)]);
    default: return atomic_load(&slots[below(SLOTS)]);
    }
}
static int64_t odd(void) {
    static const int64_t o[] = {0, 1, -1, INT64_MIN, INT64_MAX, 65536, 65537, 1ll << 32, 1ll << 40, (1ll << 40) + 1, 7};
    return o[below(sizeof o / sizeof *o)];
}

static __attribute__((noinline)) void framed(int depth) {
    tl_mem_function_enter(below(10) ? (int64_t)below(6) : odd() % 70000);
    some_calls((int)below(8));
    for (int i = (int)below(4); i > 0; i--) {
        int64_t n = (int64_t)below(300);
        char *b = tl_mem_get_buffer((int64_t)below(3), n);
        if (b) memset(b, 0x77, (size_t)n);
    }
    if (depth > 0 && below(2)) framed(depth - 1);
    if (below(10)) tl_mem_function_exit();
}

static void one(void) {
    char text[64];
    done++;
    atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
    switch (below(46)) {
    case 0: case 1: case 2: tl_mem_enter_scope(); break;
    case 3: case 4: case 5: case 6: tl_mem_exit_scope(); break;
    case 7: framed(2); break;
    case 8: tl_mem_function_exit(); break;
    case 9: tl_mem_unwind(below(2) ? tl_mem_mark() : (int64_t)next()); break;
    case 10: { int64_t m = tl_mem_mark(); some_calls((int)below(5)); tl_mem_unwind(m); break; }
    case 11: { void *b = tl_mem_get_buffer((int64_t)below(4), (int64_t)below(5000)); if (b) *(volatile char *)b = 1; break; }
    case 12: tl_mem_get_buffer(odd(), odd() < 0 ? odd() : (int64_t)below(100)); break;
    case 13: case 14: case 15: { /* a struct */
        void *p = malloc(16 + below(200));
        if (below(2)) tl_mem_register_struct(p); else tl_mem_register_struct_sized(p, below(2) ? "Node" : "", (int64_t)below(1000));
        atomic_store(&slots[below(SLOTS)], p);
        break;
    }
    case 16: case 17: case 18: { /* a custom object */
        custom *c = malloc(sizeof *c);
        atomic_store(&c->state, ALIVE);
        tl_mem_register_custom(c, custom_destructor);
        atomic_fetch_add(&made, 1);
        atomic_store(&customs[below(SLOTS)], (void *)c);
        break;
    }
    case 19: case 20: case 21: case 22: { /* a tensor */
        foreign *f = malloc(sizeof *f);
        atomic_store(&f->state, ALIVE);
        f->info = (tl_tensor_info){below(10) ? below(40) : (uint64_t)odd(), (uint8_t)below(9), (uint8_t)below(4)};
        tl_mem_register_tensor((OpaqueTensor *)f);
        atomic_fetch_add(&t_made, 1);
        atomic_store(&tensors[below(SLOTS)], (void *)f);
        break;
    }
    case 23: { /* a vector of what is registered */
        tl_vec_ptr *v = calloc(1, sizeof *v);
        for (int i = (int)below(5); i > 0; i--) {
            void *p = malloc(32);
            tl_ptr_acquire(p);
            tl_mem_register_struct(p);
            vec_push(v, p);
            tl_ptr_release(p), tl_ptr_release(p);
        }
        if (below(3) == 0) vec_push(v, any());
        tl_mem_register_vec_ptr(v);
        atomic_store(&slots[below(SLOTS)], (void *)v);
        break;
    }
    case 24: case 25: tl_ptr_acquire(any()); break;
    case 26: case 27: case 28: tl_ptr_release(any()); break;
    case 29: tl_tensor_acquire(any()); break;
    case 30: tl_tensor_release(any()); break;
    case 31: tl_ptr_inc_ref(any()); break;
    case 32: { void *p = (void *)(below(64) + 1); tl_ptr_dec_ref(p); break; }
    case 33: tl_ptr_release_bool(any()); break;
    case 34: tl_mem_unregister(any()); break;
    case 35: case 36: tl_mem_promote(any()); break;
    case 37: tl_mem_is_registered(any()); break;
    case 38: tl_mem_register_ptr(any()); break;
    case 39: case 40: case 41: { OpaqueTensor *t = atomic_load(&tensors[below(SLOTS)]); if (below(2)) tl_tensor_acquire(t); tl_tensor_release(t); break; }
    case 42: tl_mem_last_error(below(4) ? text : NULL, below(sizeof text + 1)); break;
    case 43: if (below(50) == 0) { tl_mem_leak_report(text, sizeof text); tl_mem_stats_t s = {.size = below(2) ? sizeof s : below(sizeof s + 1)}; tl_mem_stats(&s); } tl_get_refcount_count(); tl_get_pool_count(); break;
    case 44: { OpaqueTensor *t = tl_pool_acquire(below(10) ? (int64_t)below(40) : odd(), (uint8_t)below(8), (uint8_t)below(4)); if (t) tl_mem_register_tensor(t); if (below(40) == 0) tl_pool_trim(below(2) ? 0 : odd()); break; }
    case 45: {
        switch (below(64)) {
        case 0: tl_mem_set_scope_hooks(hook_enter, hook_exit); break;
        case 1: tl_mem_set_scope_hooks(NULL, hook_exit); break;
        case 4: tl_mem_misuses((int32_t)odd()); break;
        case 5: tl_mem_set_tensor_describer(below(4) ? describer : NULL); break;
        default: break;
        }
        break;
    }
    }
}
static void some_calls(int n) { while (n-- > 0 && !atomic_load_explicit(&quiet, memory_order_relaxed)) one(); }

typedef struct { uint64_t seed, calls; } job;
static void *thread(void *arg) {
    job *mine = arg;
    rng = mine->seed * 0x9E3779B97F4A7C15ull | 1;
    if (tl_get_scope_depth() != 1) die("depth of a new thread");
    uint64_t n = below(30000);
    for (uint64_t i = 0; i < n; i++) {
        one();
        if (tl_get_scope_depth() > 300) for (int k = 0; k < 200; k++) tl_mem_exit_scope();
        if ((tl_mem_mark() >> 32) > 100) for (int k = 0; k < 90; k++) tl_mem_function_exit();
    }
    atomic_fetch_add(&threads_run, 1);
    mine->calls = done;
    if (below(2)) pthread_exit(NULL);
    return NULL;
}
static void *lane(void *arg) {
    uint64_t seed = (uint64_t)(uintptr_t)arg;
    for (uint64_t made_here = 0; made_here < budget;) {
        pthread_t t;
        pthread_attr_t a;
        job next_job = {seed = seed * 6364136223846793005ull + 1442695040888963407ull, 0};
        pthread_attr_init(&a);
        pthread_attr_setstacksize(&a, seed % 3 ? 1 << 20 : 256 << 10);
        if (pthread_create(&t, &a, thread, &next_job)) die("pthread_create");
        pthread_join(t, NULL);
        pthread_attr_destroy(&a);
        made_here += next_job.calls + 1;
    }
    return NULL;
}
int main(int argc, char **argv) {
    uint64_t seed = argc > 3 ? strtoull(argv[3], 0, 0) : 1;
    if (argc > 2) width = atoi(argv[2]);
    if (width < 1 || width > 64) return 2;
    if (argc > 1) budget = strtoull(argv[1], 0, 0) / (uint64_t)width;
    rng = seed;
    tl_mem_set_tensor_destructor(tensor_destructor);
    tl_mem_set_tensor_describer(describer);
    pthread_t t[64];
    for (int i = 0; i < width; i++) pthread_create(&t[i], NULL, lane, (void *)(uintptr_t)(seed * 1000 + (uint64_t)i));
    for (int i = 0; i < width; i++) pthread_join(t[i], NULL);
    atomic_store(&quiet, 1);
    tl_mem_set_scope_hooks(NULL, NULL);
    tl_mem_close_thread();
    tl_pool_trim(0);
    tl_mem_stats_t s = {.size = sizeof s};
    tl_mem_stats(&s);
    printf("%lu calls, %lu threads; custom %lu made, %lu destroyed; tensors %lu made, %lu destroyed; live %lu, pooled %lu, quarantined %lu, slots %lu, threads attached %lu\n", calls, threads_run, made,
           destroyed, t_made, t_destroyed, s.live_objects, s.pooled_tensors, s.quarantined_tensors, s.slot_buffers + s.deferred_buffers, s.threads);
    fflush(stdout);
    if (destroyed > made || t_destroyed > t_made || s.threads > 1 || s.quarantined_tensors || s.slot_buffers) die("the books");
    return 0;
}
