/* A moving average over tensors, written as a compiler would emit it: every function has a frame, every statement a scope. */
#include <leasehold_memory.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A tensor of this program: its number of elements, then the elements. */
typedef struct {
    int64_t elements;
    float data[];
} Tensor;

/* What the pool asks: tensors of one key may take each other's place. */
static int32_t describe(const OpaqueTensor *tensor, tl_tensor_info *info) {
    info->num_elements = (uint64_t)((const Tensor *)tensor)->elements;
    info->dtype_id = TL_DTYPE_F32;
    info->device_id = TL_DEVICE_CPU;
    return 1;
}
static void destroy(OpaqueTensor *tensor) { free(tensor); }

/* A tensor from the pool if it has one, owned by the current scope. */
static OpaqueTensor *create(int64_t elements) {
    OpaqueTensor *tensor = tl_pool_acquire(elements, TL_DTYPE_F32, TL_DEVICE_CPU);
    if (!tensor) {
        Tensor *made = malloc(sizeof *made + sizeof(float) * (size_t)elements);
        made->elements = elements;
        tensor = (OpaqueTensor *)made;
    }
    tl_mem_register_tensor(tensor);
    return tensor;
}
static float *data(OpaqueTensor *tensor) { return ((Tensor *)tensor)->data; }

typedef struct {
    OpaqueTensor *window;
    void *label;
} Series;

/* Returns a new tensor, owned by the caller's scope. */
static OpaqueTensor *average(OpaqueTensor *a, OpaqueTensor *b) {
    tl_mem_function_enter(0);
    const int64_t n = ((const Tensor *)a)->elements;
    OpaqueTensor *result = create(n);
    for (int64_t i = 0; i < n; i++) data(result)[i] = 0.5f * (data(a)[i] + data(b)[i]);
    tl_mem_promote(result); /* the result outlives the frame */
    tl_mem_function_exit();
    return result;
}

/* Builds a label in a slot, then copies it into an object of its own. */
static char *label(int step) {
    tl_mem_function_enter(1);
    char *number = tl_mem_get_buffer(0, 32);
    int digits = snprintf(number, 32, "%d", step);
    size_t length = (size_t)digits + sizeof "step  of the series";
    char *text = tl_mem_get_buffer(0, 4 * (int64_t)length); /* grown, contents unspecified; the old one stays readable */
    snprintf(text, length, "step %s of the series", number);
    char *copy = malloc(length);
    memcpy(copy, text, length);
    tl_mem_register_struct_named(copy, "Label");
    tl_mem_promote(copy);
    tl_mem_function_exit();
    return copy;
}

int main(void) {
    tl_mem_set_tensor_destructor(destroy);
    tl_mem_set_tensor_describer(describe);
    tl_mem_function_enter(0);

    Series *series = malloc(sizeof *series);
    tl_mem_register_struct_named(series, "Series");
    series->window = create(4);
    series->label = NULL;
    memset(data(series->window), 0, 4 * sizeof(float));
    tl_mem_unregister(series->window); /* the struct owns it now */

    for (int step = 1; step <= 3; step++) {
        tl_mem_enter_scope();
        OpaqueTensor *input = create(4);
        for (int i = 0; i < 4; i++) data(input)[i] = (float)step;
        OpaqueTensor *next = average(series->window, input);
        tl_tensor_acquire(next); /* assignment: the new value is counted, the old one released */
        tl_tensor_release(series->window);
        series->window = next;
        char *text = label(step);
        tl_ptr_acquire(text);
        tl_ptr_release(series->label);
        series->label = text;
        tl_mem_exit_scope(); /* input goes back to the pool */
    }
    printf("%s: %g\n", (char *)series->label, (double)data(series->window)[0]);

    /* The compiler's code for the fields, then the frame ends and takes the struct with it. */
    tl_tensor_release(series->window);
    tl_ptr_release(series->label);
    tl_mem_function_exit();

    char text[256];
    int wrong = tl_get_object_count() != 0 || tl_get_scope_depth() != 1 || tl_mem_last_error(text, sizeof text) != 0;
    if (wrong && tl_mem_leak_report(text, sizeof text)) fputs(text, stderr);
    tl_pool_trim(0);
    puts(wrong ? "not ok" : "ok");
    return wrong;
}
