//! A caller that hands handles and addresses to CUDA's driver vouches for them.
#![forbid(unsafe_code)]

use leasehold_cuda::driver::ops::*;

fn addresses(ops: &dyn CudaSlowOps, at: u64) {
    let _ = ops.free(at);
    let _ = ops.address_free(at, 8);
    let _ = ops.unmap(at, 8);
    let _ = ops.host_free(at);
    let _ = ops.host_register(at, 8);
    let _ = ops.load_word(at);
    ops.store_word(at, 1);
}

fn handles(ops: &dyn CudaSlowOps, stream: NativeStream, event: NativeEvent, context: NativeContext) {
    let _ = ops.set_current(context);
    let _ = ops.context_destroy(context);
    let _ = ops.stream_destroy(stream);
    let _ = ops.stream_wait_event(stream, event);
    let _ = ops.stream_write_word(stream, 8, 1);
    let _ = ops.host_function(stream, Box::new(|| ()));
    let _ = ops.event_record(event, stream);
    let _ = ops.event_elapsed(event, event);
    let _ = ops.capture_begin(stream);
}

fn work(ops: &dyn CudaSlowOps, stream: NativeStream, launch: &Launch<'_>, copy: &NativeCopy, fill: &NativeFill) {
    let _ = ops.launch(stream, launch);
    let _ = ops.copy(stream, copy);
    let _ = ops.fill(stream, fill);
}

fn images(ops: &dyn CudaSlowOps, module: NativeModule, graph: NativeGraph, exec: NativeGraphExec, stream: NativeStream) {
    let _ = ops.module_function(module, "f", &[]);
    let _ = ops.module_load_cubin(b"\x7fELF");
    let _ = ops.module_unload(module);
    let _ = ops.graph_instantiate(graph);
    let _ = ops.exec_launch(exec, stream);
    let _ = ops.exec_destroy(exec);
}

fn main() {}
