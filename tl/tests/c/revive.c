/* A tensor that died, was registered again (revived) and died again, while its first death was still being dealt with. Exit status 0 if
 * each tensor is destroyed once, and only described while it exists. Built with the address sanitizer where there is one. */
#include "objects.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

static int failures;
#define CHECK(c) ((c) ? (void)0 : (void)(failures++, fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #c)))

/* One thread: both deaths wait behind the destructor that caused them. */
static OpaqueTensor *tensor;
static void dies_twice(void *p) {
    tl_tensor_release(tensor);
    tl_mem_register_ptr(tensor);
    tl_tensor_release(tensor);
    free(p);
}
static void one_thread(void) {
    /* Above both budgets, so that it is freed at once, and freeing unmaps it. */
    tensor_hooks();
    tensor = tensor_create(50000000);
    CHECK(tensor);
    void *object = malloc(16);
    tl_mem_register_custom(object, dies_twice);
    tl_ptr_release(object);
    CHECK(tl_mem_misuses(TL_MISUSE_REGISTER_DEAD) == 1);
}

/* Two threads: one is describing the dead tensor while the other registers it again. */
static _Atomic int step, destroyed;
static void wait_for(int value) {
    while (atomic_load(&step) != value) sched_yield();
}
static int32_t describer(const OpaqueTensor *t, tl_tensor_info *info) {
    if (atomic_load(&step) == 0) {
        atomic_store(&step, 1);
        wait_for(2);
        CHECK(atomic_load(&destroyed) == 0);
    }
    info->num_elements = *(const uint64_t *)t;
    return 0;
}
static void destructor(OpaqueTensor *t) {
    atomic_fetch_add(&destroyed, 1);
    free(t);
}
static void *other(void *unused) {
    wait_for(1);
    tl_mem_enter_scope();
    tl_mem_register_ptr(tensor);
    CHECK(tl_mem_misuses(TL_MISUSE_REGISTER_DEAD) == 1);
    CHECK(!tl_mem_is_registered(tensor)); /* too late: its death is being dealt with */
    tl_ptr_release(tensor);
    CHECK(tl_mem_misuses(TL_MISUSE_USE_OF_DEAD) == 1);
    tl_mem_exit_scope();
    atomic_store(&step, 2);
    return unused;
}
static void two_threads(void) {
    pthread_t thread;
    tl_mem_set_tensor_destructor(destructor);
    tl_mem_set_tensor_describer(describer);
    CHECK(pthread_create(&thread, 0, other, 0) == 0);
    tl_mem_enter_scope();
    tensor = calloc(1, 64);
    tl_mem_register_tensor(tensor);
    tl_ptr_release(tensor);
    pthread_join(thread, 0);
    tl_mem_exit_scope();
    CHECK(atomic_load(&destroyed) == 1);

    /* What waits in quarantine is revived, and its second death is its only one. */
    if (getenv("TL_MEM_QUARANTINE_BYTES")) return;
    tl_mem_enter_scope();
    tensor = calloc(1, 64);
    tl_mem_register_tensor(tensor);
    tl_ptr_release(tensor);
    tl_mem_register_ptr(tensor);
    CHECK(tl_mem_is_registered(tensor));
    tl_mem_exit_scope();
    CHECK(atomic_load(&destroyed) == 2);
}

int main(void) {
    one_thread();
    two_threads();
    return failures != 0;
}
