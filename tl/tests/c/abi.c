/* The C ABI from C: every row of the semantics that a C caller can see. Exit status 0 if all is well. */
#include "objects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <threads.h>

_Static_assert(sizeof(tl_vec_ptr) == 24, "layout of tl_vec_ptr");
_Static_assert(sizeof(tl_tensor_info) == 16, "layout of tl_tensor_info");
_Static_assert(sizeof(tl_mem_stats_t) == 8 * (18 + TL_MISUSE_COUNT), "layout of tl_mem_stats_t");

static int failures;
#define CHECK(c) ((c) ? (void)0 : (void)(failures++, fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #c)))

static int destroyed;
static void on_destroy(void *p) {
    destroyed++;
    int64_t misuses = tl_mem_misuses(TL_MISUSE_EXIT_SCOPE);
    tl_mem_close_thread();
    CHECK(tl_mem_misuses(TL_MISUSE_EXIT_SCOPE) == misuses + 1);
    /* A destructor may use the manager. */
    tl_mem_enter_scope();
    tl_mem_register_struct(malloc(8));
    tl_mem_exit_scope();
    free(p);
}
static void free_tensor(OpaqueTensor *t) {
    destroyed++;
    free(t);
}

static int64_t own_elements(void *container, void ***data) {
    *data = container;
    return 3;
}
static void own_destroy(void *container) { ((int *)((void **)container + 3))[0] = 3; }
static const tl_vec_ops own_ops = {own_elements, own_destroy};

static uint64_t arena = 100;
static uint64_t save_arena(void) { return arena; }
static void restore_arena(uint64_t saved) { arena = saved; }

static void forgets_function_exit(void) {
    tl_mem_function_enter(1);
    memset(tl_mem_get_buffer(0, 10), 'g', 10);
}

static int worker(void *arg) {
    (void)arg;
    tl_mem_enter_scope();
    tl_mem_function_enter(2);
    (void)tl_mem_get_buffer(0, 100);
    tl_mem_register_custom(malloc(16), on_destroy);
    for (int i = 0; i < 1000; i++) {
        tl_mem_enter_scope();
        tl_mem_register_struct(malloc(32));
        tl_mem_exit_scope();
    }
    return 0; /* with a frame and two scopes open */
}

/* The temporary of an expression is released twice around a reuse of its memory: 0.5, 0.25, 0.125. */
static double halves(int rounds) {
    double result = 0;
    OpaqueTensor *x = tensor_create(4);
    *tensor_data(x) = 1.0;
    for (int i = 0; i < rounds; i++) {
        tl_mem_enter_scope();
        OpaqueTensor *half = tensor_create(4);
        *tensor_data(half) = 0.5;
        double factor = *tensor_data(half);
        tl_tensor_release(half);
        OpaqueTensor *product = tensor_create(4);
        *tensor_data(product) = *tensor_data(x) * factor;
        tl_tensor_release(half); /* the bug */
        int alive = tl_mem_is_registered(product);
        result = alive ? *tensor_data(product) : 0.0;
        if (alive) {
            tl_mem_promote(product);
            x = product;
        }
        tl_mem_exit_scope();
    }
    return result;
}

int main(void) {
    CHECK(tl_get_scope_depth() == 1);
    CHECK(strlen(tl_mem_version()) > 0);
    tl_mem_exit_scope();
    CHECK(tl_get_scope_depth() == 1 && tl_mem_misuses(TL_MISUSE_EXIT_SCOPE) == 1);

    /* counts */
    tl_mem_enter_scope();
    void *s = malloc(64);
    tl_mem_register_struct_named(s, "Node");
    tl_ptr_acquire(s);
    tl_mem_exit_scope();
    CHECK(tl_get_object_count() == 1);
    char text[512];
    CHECK(tl_mem_leak_report(text, sizeof text) > 0 && strstr(text, "name=Node"));
    CHECK(tl_ptr_release_bool(s) == 1 && tl_ptr_release_bool(s) == 0 && tl_get_object_count() == 0);
    CHECK(tl_mem_last_error(text, sizeof text) > 0 && strstr(text, "release_unknown"));
    CHECK(tl_ptr_dec_ref(NULL) == 0 && tl_ptr_dec_ref(&s) == 1);
    tl_ptr_inc_ref(&s);
    CHECK(tl_ptr_dec_ref(&s) == 0 && tl_ptr_dec_ref(&s) == 1);

    /* frames: the function in the middle forgets function_exit, the outer one's slots must not shift */
    tl_mem_function_enter(2);
    char *mine = tl_mem_get_buffer(1, 6);
    strcpy(mine, "outer");
    forgets_function_exit();
    CHECK(tl_mem_get_buffer(1, 6) == mine && strcmp(mine, "outer") == 0);
    CHECK(tl_mem_misuses(TL_MISUSE_FRAME_REPAIRED) == 0 && tl_get_scope_depth() == 3);
    tl_mem_enter_scope();
    forgets_function_exit();
    tl_mem_exit_scope();
    CHECK(tl_get_scope_depth() == 3 && tl_mem_misuses(TL_MISUSE_FRAME_REPAIRED) == 1);
    forgets_function_exit();
    tl_mem_enter_scope();
    tl_mem_function_exit();
    CHECK(tl_get_scope_depth() == 1);
    tl_mem_function_exit();
    tl_mem_function_enter(-3);
    CHECK(tl_mem_get_buffer(0, 1) == NULL);
    tl_mem_function_exit();
    tl_mem_function_enter(1);
    char *a = tl_mem_get_buffer(0, 20);
    memset(a, 'a', 20);
    char *b = tl_mem_get_buffer(0, 5000);
    CHECK(a != b && a[19] == 'a');
    CHECK(tl_mem_get_buffer(0, -1) == NULL && tl_mem_get_buffer(0, INT64_MAX) == NULL && tl_mem_get_buffer(0, 5000) == b);
    tl_mem_function_exit();

    /* marks */
    int64_t mark = tl_mem_mark();
    tl_mem_function_enter(1);
    tl_mem_enter_scope();
    tl_mem_register_struct(malloc(1));
    tl_mem_unwind(mark);
    CHECK(tl_get_scope_depth() == 1 && tl_get_object_count() == 0);

    /* hooks */
    tl_mem_set_scope_hooks(save_arena, restore_arena);
    tl_mem_enter_scope();
    arena = 500;
    tl_mem_exit_scope();
    CHECK(arena == 100);
    tl_mem_set_scope_hooks(NULL, NULL);
    tl_mem_set_tensor_destructor(free_tensor);
    tl_mem_enter_scope();
    tl_mem_register_custom(malloc(4), on_destroy);
    tl_mem_register_tensor((OpaqueTensor *)malloc(4));
    tl_mem_exit_scope();
    CHECK(destroyed == 2);

    /* vectors */
    tl_mem_enter_scope();
    tl_vec_ptr *v = calloc(1, sizeof *v);
    tl_mem_register_vec_ptr(v);
    for (int i = 0; i < 10; i++) {
        tl_mem_enter_scope();
        void *e = malloc(8);
        tl_mem_register_custom(e, on_destroy);
        vec_push(v, e);
        tl_mem_exit_scope();
    }
    CHECK(destroyed == 2);
    tl_mem_exit_scope();
    CHECK(destroyed == 12 && tl_get_object_count() == 0);

    /* threads: one that ends with open scopes */
    thrd_t thread[4];
    for (int i = 0; i < 4; i++) CHECK(thrd_create(&thread[i], worker, NULL) == thrd_success);
    for (int i = 0; i < 4; i++) thrd_join(thread[i], NULL);
    CHECK(tl_get_object_count() == 0);
    /* What has a destructor of the program's is left to the next scope that opens anywhere. */
    CHECK(destroyed < 16);
    tl_mem_enter_scope();
    CHECK(destroyed == 16);
    tl_mem_exit_scope();

    /* unless the thread closes what it has open */
    tl_mem_register_custom(malloc(16), on_destroy);
    tl_mem_function_enter(1);
    tl_mem_enter_scope();
    tl_mem_close_thread();
    CHECK(destroyed == 17 && tl_get_scope_depth() == 1 && tl_get_object_count() == 0);

    /* containers of the program's own */
    static struct { void *elements[3]; int freed; } own;
    for (int i = 0; i < 3; i++) tl_mem_register_struct(own.elements[i] = malloc(8)), tl_mem_unregister(own.elements[i]);
    tl_mem_enter_scope();
    tl_mem_register_container(&own, &own_ops);
    tl_mem_exit_scope();
    CHECK(own.freed == 3 && tl_get_object_count() == 0);

    /* the compiler's bug: right with quarantine, wrong without (which shows that this can tell) */
    tl_mem_enter_scope();
    tensor_hooks();
    CHECK(halves(3) == (getenv("TL_MEM_QUARANTINE_BYTES") ? 0.0 : 0.125));
    tl_mem_exit_scope();
    CHECK(tl_get_pool_count() > 0 && tl_get_refcount_count() == 0);
    CHECK(tl_pool_trim(0) > 0 && tl_get_pool_count() == 0);

    tl_mem_stats_t stats = {.size = sizeof stats};
    CHECK(tl_mem_stats(&stats) == 0 && stats.live_objects == 0 && stats.slot_bytes == 0 && stats.deferred_bytes == 0);
    CHECK(stats.misuses[TL_MISUSE_FUNCTION_EXIT] == 1 && stats.peak_live_objects >= 11);
    CHECK(tl_get_scope_depth() == 1);
    return failures != 0;
}
