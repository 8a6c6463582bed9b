/* leasehold_memory.h: the memory manager for compiled code.
 *
 * Scopes, function frames, reference counts and a tensor pool, for functions that a compiler emits. C11 and C++17.
 *
 * Rules for all functions
 *  - None panics, throws, unwinds or aborts, whatever it is given. A wrong call is a no-op, counted by kind (TL_MISUSE_*) and
 *    kept per thread for tl_mem_last_error. A null pointer is a no-op and not a misuse, unless said otherwise.
 *  - Without memory a call is a no-op too (TL_MISUSE_OUT_OF_MEMORY), also the first of a process or thread. A call that found no memory
 *    to attach its thread is counted in tl_mem_stats only.
 *  - Any thread may call any function at any time, destructors and hooks included; not from signal handlers. Scopes and
 *    frames belong to the calling thread; objects, counts and the pool are common to all.
 *  - No function blocks, except for short internal locks. Destructors and hooks run outside every lock, one after the other: what
 *    a destructor releases last is destroyed after it has returned.
 *
 * Destructors and hooks
 *  - They return. An exception that leaves one ends the process, as it would in a C++ destructor that is noexcept: catch it inside. Neither
 *    longjmp nor pthread_exit may leave one, since the thread would destroy nothing any more until its end: note that you want to
 *    leave, return, and leave after the call that led here. Out of ordinary code longjmp is welcome: take tl_mem_mark before setjmp, and
 *    tl_mem_unwind after it.
 *
 * Ends of threads and of the process
 *  - A thread attaches at its first call. When it ends, its open frames and scopes are closed, the outermost included. At that time
 *    its thread-local objects are gone, so nothing of the program's is called there: no scope hook, no describer, no destructor. Structs and
 *    tl_vec_ptr objects are freed. A tensor, or an object with a destructor of the program, waits for the next scope or frame that
 *    any thread opens, or for tl_pool_trim, and is destroyed there. A thread that wants its own destructors to run calls tl_mem_close_thread.
 *  - After that (in later destructors of pthread keys) acquire and release still work, everything else is a no-op.
 *  - When the process exits, nothing is closed and nothing called. Call tl_mem_close_thread before, if it should be.
 *
 * Forks, coroutines, unloading
 *  - A child of fork() may use everything; its only thread goes on in its scopes and frames. Objects that scopes of the other threads held stay
 *    alive in the child. Do not fork in a signal handler.
 *  - Scopes and frames know threads, not coroutines. A coroutine that switches away must have closed what it opened, or must be resumed
 *    and have closed it before the function that was running when it opened it closes its own.
 *  - dlclose does not unload the shared library. An own shared object that contains the static library is linked with -z nodelete.
 *
 * Environment, read once: TL_MEM_QUARANTINE_BYTES (default 67108864, 0: off), TL_MEM_POOL_BYTES (default 268435456),
 * TL_MEM_LOG (1 or stderr: a line per event to standard error; another value but 0: append to that file).
 */
#ifndef LEASEHOLD_MEMORY_H
#define LEASEHOLD_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A tensor: an address. Its destructor decides what the address means. */
typedef struct OpaqueTensor OpaqueTensor;

/* ---- scopes ---- */

/* Opens a scope. */
void tl_mem_enter_scope(void);

/* Closes the current scope: each of its records is released once, the newest first; what has other counts survives. At the
 * thread's outermost scope, and at a function's own, this is a misuse (TL_MISUSE_EXIT_SCOPE). */
void tl_mem_exit_scope(void);

/* The calling thread's depth: 1 at rest. */
int64_t tl_get_scope_depth(void);

/* The present position, for tl_mem_unwind. */
int64_t tl_mem_mark(void);

/* Closes every frame and scope opened since the mark, as an early error return needs it. A mark that does not enclose the
 * present position is a misuse. */
void tl_mem_unwind(int64_t mark);

/* Closes every frame and scope of the calling thread, its outermost scope's records included, hooks and destructors as ever. Call it
 * before a thread returns that still holds something, and at the end of main. Inside a destructor or hook it is a misuse
 * (TL_MISUSE_EXIT_SCOPE). */
void tl_mem_close_thread(void);

/* ---- function frames and slot buffers ---- */

/* Opens a scope and a frame with num_slots slots (0 to 65536; otherwise a misuse, and a frame without slots). A helper function may open
 * a frame for its caller. A function that forgets tl_mem_function_exit is recognised by the stack. If it used one of its slots, its
 * caller's requests for slots pass over its frame, and the end of the caller's own frame closes it (TL_MISUSE_FRAME_REPAIRED). If it
 * used none, its frame may be one that a helper opened: the caller's requests for slots use it, and the caller's next
 * tl_mem_function_exit closes it. The caller's own frame is then closed when a function further out ends its frame, when the caller
 * runs again and nothing was registered meanwhile, by tl_mem_unwind, or when the thread ends. When the caller runs again, the place
 * that forgot is known (64 places a thread), and its frames end with the caller's. So a caller that has a frame leaves a few open,
 * however often it runs. A caller without a frame takes tl_mem_mark and tl_mem_unwind. */
void tl_mem_function_enter(int64_t num_slots);

/* Closes the newest frame: every scope opened since (each one left open is counted), then its buffers. It may be a function's last
 * call, of which compilers make a jump. */
void tl_mem_function_exit(void);

/* The same, and it closes forgotten frames too, as tl_mem_function_enter says. The compiler must make a call of it, and no jump: `notail`
 * in LLVM's IR. In C and C++ with gcc and clang tl_mem_function_exit is this function, and code behind it keeps it a call. */
void tl_mem_function_exit_notail(void);
#ifdef __GNUC__
static __inline__ __attribute__((__always_inline__, __unused__)) void tl_mem_function_exit_as_call(void) {
    tl_mem_function_exit_notail();
    __asm__ volatile("");
}
#define tl_mem_function_exit() tl_mem_function_exit_as_call()
#endif

/* A buffer of at least min_size bytes in a slot of the newest frame. Large enough already: the same pointer, contents kept. Too
 * small: a new buffer of unspecified contents (sizes grow geometrically); the old one stays readable until the frame ends. NULL, and
 * a misuse, without a frame, for a slot it does not have, for a negative size, or without memory; the slot keeps its buffer. */
void *tl_mem_get_buffer(int64_t slot_id, int64_t min_size);

/* ---- registration: the first time count 1 and a record in the current scope, again one count and one record more ---- */

/* Memory from malloc. The last release is free(); the fields are the compiler's business. */
void tl_mem_register_struct(void *ptr);

/* The same, with a name for leak reports (copied once; at most 255 bytes count). */
void tl_mem_register_struct_named(void *ptr, const char *name);

/* The same, with the size in bytes too, so that live bytes and leak reports know it. */
void tl_mem_register_struct_sized(void *ptr, const char *name, int64_t size);

/* A tensor. Its last release hands it, at the end of the scope in which it died, to the pool if its key is known, else to
 * the tensor destructor. */
void tl_mem_register_tensor(OpaqueTensor *ptr);

/* A vector of pointers; container and buffer come from malloc. */
typedef struct tl_vec_ptr {
    void **data;
    int64_t len;
    int64_t capacity; /* the manager does not read it */
} tl_vec_ptr;

/* A tl_vec_ptr, each of whose elements brings one count with it. Its last release releases every element once, then frees buffer and
 * container. For others see tl_mem_register_container. */
void tl_mem_register_vec_ptr(void *ptr);

/* How a container of counted pointers is handled whose layout the library does not know: a Rust Vec, a std::vector<void *>. */
typedef struct tl_vec_ops {
    int64_t (*elements)(void *container, void ***data); /* stores where the elements are, returns how many */
    void (*destroy)(void *container);                   /* after its elements were released */
} tl_vec_ops;

/* Such a container. Its last release releases every element once, then destroys it. *ops is read then: it must stay. NULL as ops: no
 * effect. */
void tl_mem_register_container(void *ptr, const tl_vec_ops *ops);

/* An object with a destructor of its own, which is called once. */
void tl_mem_register_custom(void *ptr, void (*destructor)(void *));

/* An object that is known already, once more, as what it is. Unknown: a misuse. */
void tl_mem_register_ptr(void *ptr);

/* Removes the newest record in the nearest enclosing scope that has one. The count stays: ownership moves to the caller. */
void tl_mem_unregister(void *ptr);

/* Moves a record from the current scope to its parent, in one step. */
void tl_mem_promote(void *ptr);

/* 1 if any scope of the calling thread has a record of the object, else 0. */
int32_t tl_mem_is_registered(void *ptr);

/* ---- reference counts ---- */

/* One count more. An unknown address becomes an untyped entry with count 1, whose last release frees nothing. */
void tl_ptr_acquire(void *ptr);
void tl_tensor_acquire(OpaqueTensor *ptr);

/* One count less; at zero the object is destroyed. An unknown or dead address: a misuse. */
void tl_ptr_release(void *ptr);
void tl_tensor_release(OpaqueTensor *ptr);

/* As tl_ptr_acquire, but an unknown address gets count 2: the caller's and the new one. */
void tl_ptr_inc_ref(void *ptr);

/* One count less. 1: the count is zero (or the address unknown), the manager has forgotten it and the caller must free it. */
int32_t tl_ptr_dec_ref(void *ptr);

/* As tl_ptr_release; 1 if the object was found and released, else 0. */
int32_t tl_ptr_release_bool(void *ptr);

/* ---- hooks and limits ---- */

/* A tensor's key. */
typedef struct tl_tensor_info {
    uint64_t num_elements;
    uint8_t dtype_id;  /* TL_DTYPE_*, or an id of your own: an element then counts as 8 bytes */
    uint8_t device_id; /* TL_DEVICE_*, or an id of your own */
} tl_tensor_info;

enum { TL_DTYPE_F32 = 0, TL_DTYPE_F64 = 1, TL_DTYPE_I64 = 2, TL_DTYPE_U32 = 3, TL_DTYPE_U8 = 4, TL_DTYPE_F16 = 5, TL_DTYPE_BF16 = 6 };
enum { TL_DEVICE_CPU = 0, TL_DEVICE_CUDA = 1, TL_DEVICE_METAL = 2 };

/* What destroys tensors (NULL: none; such tensors are lost, and a misuse is counted). Called once per tensor. */
void tl_mem_set_tensor_destructor(void (*hook)(OpaqueTensor *));

/* What tells the pool a tensor's key: fills in the struct and returns non-zero, or 0 for a tensor not to be pooled. While it runs, its
 * tensor cannot be revived. */
void tl_mem_set_tensor_describer(int32_t (*hook)(const OpaqueTensor *, tl_tensor_info *));

/* What runs when a scope opens, and, with the value it returned, after the scope's records were released. Either NULL: none. */
void tl_mem_set_scope_hooks(uint64_t (*enter)(void), void (*exit)(uint64_t));

/* ---- tensor pool ---- */

/* Takes a described tensor out of the pool; it is unknown to the manager until registered. NULL if there is none. */
OpaqueTensor *tl_pool_acquire(int64_t num_elements, uint8_t dtype_id, uint8_t device_id);

/* Destroys pooled tensors, the keys used longest ago first, until at most that many bytes remain; returns the bytes freed. */
int64_t tl_pool_trim(int64_t bytes);

/* ---- figures ---- */

int64_t tl_get_pool_count(void);     /* tensors in the pool */
int64_t tl_get_refcount_count(void); /* live tensors */
int64_t tl_get_object_count(void);   /* live objects of every kind */

/* Kinds of misuse. */
enum {
    TL_MISUSE_EXIT_SCOPE = 0, /* exit_scope without a matching enter_scope in this function, thread or destructor */
    TL_MISUSE_FUNCTION_EXIT = 1, /* function_exit without a matching function_enter */
    TL_MISUSE_SLOT_COUNT = 2, /* function_enter with a negative or absurd number of slots */
    TL_MISUSE_NO_FRAME = 3, /* get_buffer outside any function */
    TL_MISUSE_SLOT_INDEX = 4, /* get_buffer with a slot that the frame does not have */
    TL_MISUSE_SIZE = 5, /* A negative size, or one beyond the address space */
    TL_MISUSE_RELEASE_UNKNOWN = 6, /* Release of an address that is not known */
    TL_MISUSE_USE_OF_DEAD = 7, /* Release or acquire of a tensor that is dead already */
    TL_MISUSE_REGISTER_UNKNOWN = 8, /* register_ptr of an address that is not known */
    TL_MISUSE_REGISTER_DEAD = 9, /* Registration of a tensor that is dead already (it is revived where that is still possible) */
    TL_MISUSE_KIND_MISMATCH = 10, /* An object was named as another kind than the one it has */
    TL_MISUSE_NOT_REGISTERED = 11, /* unregister or promote of an address without a record */
    TL_MISUSE_MARK = 12, /* unwind to a mark that does not enclose the present position */
    TL_MISUSE_TENSOR_KEY = 13, /* The key of a tensor whose size is beyond the address space */
    TL_MISUSE_OUT_OF_MEMORY = 14, /* There was no memory for the request */
    TL_MISUSE_SCOPE_REPAIRED = 15, /* A scope that was left open and was closed by function_exit, by an outer exit_scope or after a destructor */
    TL_MISUSE_FRAME_REPAIRED = 16, /* A frame whose function returned without function_exit, closed on its behalf */
    TL_MISUSE_NO_DESTRUCTOR = 17, /* A tensor died for which there is no destructor; its memory is lost */
    TL_MISUSE_COUNT = 18
};

typedef struct tl_mem_stats_t {
    uint64_t size; /* set it to sizeof(tl_mem_stats_t) before the call */
    uint64_t live_objects; /* Objects with a count */
    uint64_t live_tensors; /* Tensors with a count */
    uint64_t live_bytes; /* Bytes of the live objects whose size is known */
    uint64_t peak_live_objects; /* Highest number of objects with a count */
    uint64_t peak_live_bytes; /* Highest number of bytes of live objects whose size is known */
    uint64_t pooled_tensors; /* Tensors in the pool */
    uint64_t pooled_bytes; /* Their bytes */
    uint64_t peak_pooled_bytes; /* Highest number of bytes in the pool */
    uint64_t quarantined_tensors; /* Dead tensors that wait for the end of their scope */
    uint64_t quarantined_bytes; /* Their bytes */
    uint64_t peak_quarantined_bytes; /* Highest number of bytes in quarantine */
    uint64_t slot_buffers; /* Current slot buffers of all frames */
    uint64_t slot_bytes; /* Their bytes */
    uint64_t deferred_buffers; /* Slot buffers that were outgrown and wait for function_exit */
    uint64_t deferred_bytes; /* Their bytes */
    uint64_t peak_slot_bytes; /* Sum over the present threads of each one's highest number of slot and deferred bytes */
    uint64_t threads; /* Threads attached */
    uint64_t misuses[TL_MISUSE_COUNT]; /* all threads since the start */
} tl_mem_stats_t;

/* Fills in the figures, as many as the struct has room for. 0, or -1 for NULL or a size under 8. */
int32_t tl_mem_stats(tl_mem_stats_t *stats);

/* How often the calling thread has done this misuse; -1 for an unknown kind. */
int64_t tl_mem_misuses(int32_t kind);

/* Writes what the calling thread did wrong last, cut to fit; returns the length of the full text, 0 if there is none. */
size_t tl_mem_last_error(char *buf, size_t len);

/* Writes what is alive, a line per kind and name; returns the length of the full text. */
size_t tl_mem_leak_report(char *buf, size_t len);

/* The version of the library. */
const char *tl_mem_version(void);

#ifdef __cplusplus
}
#endif

#endif
