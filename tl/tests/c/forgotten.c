/* Functions that forget their frames, called again and again. Each form runs in a thread of its own, which knows no
 * place that forgets. Exit status 0 if all is well. */
#include "leasehold_memory.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static int failures;
#define FUNCTION static __attribute__((noinline))
/* Keeps a call from becoming a jump, which would make it the caller's. */
#define NO_JUMP __asm__ volatile("")

enum { MAIN_FRAME = 1, CALLEE_USES = 2, CALLEE_REGISTERS = 4, CALLER_ASKS = 8, ASKS_BEFORE = 16, CALLER_REGISTERS = 32,
       CALLED_TWICE = 64, TWO_CALLEES = 128, TWO_CALLERS = 256, FORMS = 512 };
enum { RUNS = 1000 };

static int64_t registered, destroyed;
static void destroy(void *p) { destroyed++, free(p); }
FUNCTION void add(void) { registered++, tl_mem_register_custom(malloc(8), destroy); NO_JUMP; }

FUNCTION void forgets(int form) {
    tl_mem_function_enter(1);
    if (form & CALLEE_USES) tl_mem_get_buffer(0, 8);
    if (form & CALLEE_REGISTERS) add();
    NO_JUMP;
}
FUNCTION void forgets_too(int form) {
    tl_mem_function_enter(2);
    if (form & CALLEE_USES) tl_mem_get_buffer(1, 8);
    if (form & CALLEE_REGISTERS) add();
    NO_JUMP;
}
static inline __attribute__((always_inline)) void body(int form) {
    tl_mem_function_enter(1);
    if (form & CALLER_REGISTERS) add();
    if (form & ASKS_BEFORE) tl_mem_get_buffer(0, 8);
    forgets(form);
    if (form & CALLED_TWICE) forgets(form);
    if (form & TWO_CALLEES) forgets_too(form);
    if (form & CALLER_ASKS) tl_mem_get_buffer(0, 64);
    tl_mem_function_exit();
}
FUNCTION void caller(int form) { body(form); }
FUNCTION void other_caller(int form) { body(form); }

static void *run(void *arg) {
    int form = (int)(intptr_t)arg;
    registered = destroyed = 0;
    if (form & MAIN_FRAME) tl_mem_function_enter(0);
    int64_t depth = tl_get_scope_depth(), live = 0, deepest = 0;
    for (int i = 0; i < RUNS; i++) {
        caller(form);
        if (form & TWO_CALLERS) other_caller(form);
        int64_t now = tl_get_scope_depth() - depth;
        deepest = now > deepest ? now : deepest;
        live = registered - destroyed > live ? registered - destroyed : live;
    }
    if (form & MAIN_FRAME) tl_mem_function_exit();
    int64_t after = tl_get_scope_depth() - 1, left = registered - destroyed;
    int healed = !(form & MAIN_FRAME) || (after == 0 && left == 0);
    if (deepest > 16 || live > 16 || !healed) {
        failures++;
        fprintf(stderr, "form %d: %ld frames, %ld objects; at the end %ld, %ld\n", form, (long)deepest, (long)live, (long)after, (long)left);
    }
    tl_mem_close_thread();
    if (tl_get_scope_depth() != 1 || registered != destroyed) failures++;
    return NULL;
}

int main(void) {
    for (intptr_t form = 0; form < FORMS; form++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, run, (void *)form) || pthread_join(thread, NULL)) return 2;
    }
    if (failures) fprintf(stderr, "%d of %d forms\n", failures, FORMS);
    return failures != 0;
}
