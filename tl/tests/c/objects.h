/* Tensors and vectors of these programs. A tensor is a block from malloc: its key, then its elements. */
#include "leasehold_memory.h"

#include <stdlib.h>

typedef struct {
    tl_tensor_info key;
    double data[];
} tensor_block;

static inline int32_t tensor_describe(const OpaqueTensor *t, tl_tensor_info *key) {
    *key = ((const tensor_block *)t)->key;
    return 1;
}
static inline void tensor_destroy(OpaqueTensor *t) { free(t); }
static inline void tensor_hooks(void) {
    tl_mem_set_tensor_destructor(tensor_destroy);
    tl_mem_set_tensor_describer(tensor_describe);
}

/* A tensor of doubles, from the pool if it has one, registered in the current scope; NULL without memory. */
static inline OpaqueTensor *tensor_create(int64_t elements) {
    OpaqueTensor *t = tl_pool_acquire(elements, TL_DTYPE_F64, TL_DEVICE_CPU);
    if (!t && (t = malloc(sizeof(tensor_block) + 8 * (size_t)elements)))
        ((tensor_block *)t)->key = (tl_tensor_info){(uint64_t)elements, TL_DTYPE_F64, TL_DEVICE_CPU};
    tl_mem_register_tensor(t);
    return t;
}
static inline double *tensor_data(OpaqueTensor *t) { return ((tensor_block *)t)->data; }

/* Appends an element and counts it once more. */
static inline void vec_push(tl_vec_ptr *vec, void *element) {
    if (vec->len == vec->capacity) {
        vec->capacity = 2 * vec->capacity + 1;
        vec->data = realloc(vec->data, (size_t)vec->capacity * sizeof *vec->data);
        if (!vec->data) abort();
    }
    vec->data[vec->len++] = element;
    tl_ptr_acquire(element);
}
