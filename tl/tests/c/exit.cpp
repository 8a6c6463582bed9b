// Scopes that a thread leaves open when it ends, and that the process leaves open when it exits: nothing of the program's is called there, since its
// thread-local objects are gone. The first argument says how the program ends. Exit status 0 if all is well.
#include "leasehold_memory.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

static thread_local bool gone = false;
struct Arena {
    std::vector<std::string> strings;
    ~Arena() { gone = true; }
};
static thread_local Arena arena;

static void use() {
    if (gone) {
        std::fputs("called after the thread's objects are gone\n", stderr);
        std::_Exit(1);
    }
    arena.strings.push_back(std::string(60, 'x'));
}
static uint64_t enter() {
    use();
    return arena.strings.size();
}
static void leave(uint64_t) { use(); }
static int32_t describe(const OpaqueTensor *, tl_tensor_info *info) {
    use();
    *info = tl_tensor_info{1, TL_DTYPE_F32, TL_DEVICE_CPU};
    return 0;
}
static int destroyed = 0, early = 0;
static void destroy_tensor(OpaqueTensor *t) {
    use();
    destroyed++;
    std::free(t);
}
static void destroy(void *p) {
    use();
    destroyed++;
    std::free(p);
}
static int64_t elements(void *, void ***) {
    use();
    return 0;
}
static const tl_vec_ops ops = {elements, destroy};

static void open_all() {
    // Attached before the arena exists, so that a thread-local destructor would come after the arena's.
    tl_mem_get_buffer(0, 1);
    tl_mem_set_scope_hooks(enter, leave);
    tl_mem_enter_scope();
    tl_mem_function_enter(2);
    tl_mem_get_buffer(1, 100);
    tl_mem_register_custom(std::malloc(8), destroy);
    tl_mem_register_container(std::malloc(8), &ops);
    tl_mem_register_tensor(static_cast<OpaqueTensor *>(std::malloc(8)));
    tl_mem_register_struct(std::malloc(8));
    OpaqueTensor *dead = static_cast<OpaqueTensor *>(std::malloc(8));
    tl_mem_register_tensor(dead);
    tl_tensor_release(dead);
    early = destroyed; // without quarantine
}

int main(int, char **words) {
    tl_mem_set_tensor_destructor(destroy_tensor);
    tl_mem_set_tensor_describer(describe);
    if (!std::strcmp(words[1], "return")) open_all();
    if (!std::strcmp(words[1], "exit")) {
        open_all();
        std::exit(0);
    }
    if (!std::strcmp(words[1], "exit-in-thread")) std::thread([] { open_all(), std::exit(0); }).join();
    if (!std::strcmp(words[1], "thread")) {
        std::thread(open_all).join();
        if (destroyed != early || tl_get_object_count() != 0) return 2;
        // What the thread left is destroyed where the next scope opens.
        tl_mem_enter_scope();
        if (destroyed != 4) return 3;
        tl_mem_exit_scope();
    }
    if (!std::strcmp(words[1], "close")) {
        std::thread([] { open_all(), tl_mem_close_thread(); }).join();
        open_all();
        tl_mem_close_thread();
        if (destroyed != 8 || tl_get_scope_depth() != 1) return 4;
    }
    return 0;
}
