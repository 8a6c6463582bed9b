/* A moving average over tensors, written as a compiler would emit it: every function has a frame, every statement a scope. */
#include <leasehold_memory.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    OpaqueTensor *window;
    void *label;
} Series;

/* Returns a new tensor, owned by the caller's scope. */
static OpaqueTensor *average(OpaqueTensor *a, OpaqueTensor *b) {
    tl_mem_function_enter(0);
    const int64_t n = lh_tensor_num_elements(a);
    OpaqueTensor *result = lh_tensor_create(&n, 1, TL_DTYPE_F32);
    const float *x = lh_tensor_data(a), *y = lh_tensor_data(b);
    float *z = lh_tensor_data(result);
    for (int64_t i = 0; i < n; i++) z[i] = 0.5f * (x[i] + y[i]);
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
    const int64_t shape[1] = {4};
    tl_mem_function_enter(0);

    Series *series = malloc(sizeof *series);
    tl_mem_register_struct_named(series, "Series");
    series->window = lh_tensor_create(shape, 1, TL_DTYPE_F32);
    series->label = NULL;
    memset(lh_tensor_data(series->window), 0, 4 * sizeof(float));
    tl_mem_unregister(series->window); /* the struct owns it now */

    for (int step = 1; step <= 3; step++) {
        tl_mem_enter_scope();
        OpaqueTensor *input = lh_tensor_create(shape, 1, TL_DTYPE_F32);
        float *data = lh_tensor_data(input);
        for (int i = 0; i < 4; i++) data[i] = (float)step;
        OpaqueTensor *next = average(series->window, input);
        lh_tensor_retain(next); /* assignment: the new value is counted, the old one released */
        lh_tensor_release(series->window);
        series->window = next;
        char *text = label(step);
        tl_ptr_acquire(text);
        tl_ptr_release(series->label);
        series->label = text;
        tl_mem_exit_scope(); /* input goes back to the pool */
    }
    printf("%s: %g\n", (char *)series->label, (double)((float *)lh_tensor_data(series->window))[0]);

    /* The compiler's code for the fields, then the frame ends and takes the struct with it. */
    lh_tensor_release(series->window);
    tl_ptr_release(series->label);
    tl_mem_function_exit();

    char text[256];
    int wrong = tl_get_object_count() != 0 || tl_get_scope_depth() != 1 || tl_mem_last_error(text, sizeof text) != 0;
    if (wrong && tl_mem_leak_report(text, sizeof text)) fputs(text, stderr);
    tl_pool_trim(0);
    puts(wrong ? "not ok" : "ok");
    return wrong;
}
