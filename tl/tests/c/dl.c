/* The library is loaded and closed again and again, used by threads that have ended: dl LIBRARY. Exit status 0 if it does not
 * grow, and a thread that ends after it was closed finds it still there. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static long resident(void) {
    long all, pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%ld %ld", &all, &pages) != 2) return -1;
    fclose(f);
    return pages * 4;
}
static void call(void *library) {
    void (*enter)(void), (*add)(void *), (*leave)(void);
    *(void **)&enter = dlsym(library, "tl_mem_enter_scope");
    *(void **)&add = dlsym(library, "tl_mem_register_struct");
    *(void **)&leave = dlsym(library, "tl_mem_exit_scope");
    enter(), add(malloc(10)), leave();
}
static void *use(void *library) {
    call(library);
    return 0;
}
static void *use_and_close(void *library) {
    call(library);
    dlclose(library);
    return 0;
}
int main(int count, char **words) {
    if (count < 2) return 2;
    long before = 0;
    for (int i = 0; i < 1000; i++) {
        void *library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);
        if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
        pthread_t t;
        pthread_create(&t, 0, i % 2 ? use : use_and_close, library);
        pthread_join(t, 0);
        if (i % 2) dlclose(library);
        if (i == 100) before = resident();
    }
    long more = resident() - before;
    fprintf(stderr, "%ld KiB more\n", more);
    return more > 2000;
}
