//! [`Vouched`]: the driver for a program that vouches once for all its handles.
//!
//! Scenarios, figures and tests make hundreds of calls, many of them wrong on purpose. Such a
//! program states its soundness once, at its start, and not call by call. The engine does not use
//! this type: each of its calls states what it relies on.
//!
//! This module must not know its users.

use leasehold_core::Result;
use leasehold_cuda::driver::ops::{
    CudaSlowOps, FunctionInfo, HostFunction, NativeCondition, NativeContext, NativeEvent,
    NativeFunction, NativeGraph, NativeGraphExec, NativeMemory, NativeModule, NativeNode,
    NativeStream, Progress,
};
use leasehold_hal::ConditionalKind;
use std::ops::Deref;

/// The driver, with safe methods for the calls that take handles and addresses. The maker of the
/// value vouches for their arguments.
#[derive(Clone, Copy)]
pub struct Vouched<'a>(&'a dyn CudaSlowOps);

impl<'a> Vouched<'a> {
    /// Vouches for a program's calls.
    ///
    /// # Safety
    /// - Each handle and address that this value, or a copy of it, ever gets meets the contract of
    ///   the trait's method; or the driver is known to check and refuse it.
    #[must_use]
    pub unsafe fn new(ops: &'a dyn CudaSlowOps) -> Self {
        Self(ops)
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn set_current(self, context: NativeContext) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.set_current(context) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn enable_peer(self, peer: NativeContext) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.enable_peer(peer) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn disable_peer(self, peer: NativeContext) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.disable_peer(peer) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn context_destroy(self, context: NativeContext) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.context_destroy(context) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn primary_release(self, ordinal: u32) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.primary_release(ordinal) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn free(self, addr: u64) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.free(addr) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn alloc_async(self, bytes: u64, stream: NativeStream) -> Result<u64> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.alloc_async(bytes, stream) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn free_async(self, addr: u64, stream: NativeStream) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.free_async(addr, stream) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn address_free(self, addr: u64, bytes: u64) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.address_free(addr, bytes) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn memory_release(self, memory: NativeMemory) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.memory_release(memory) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn map(self, addr: u64, bytes: u64, memory: NativeMemory) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.map(addr, bytes, memory) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn unmap(self, addr: u64, bytes: u64) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.unmap(addr, bytes) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn set_access(self, addr: u64, bytes: u64, ordinals: &[u32]) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.set_access(addr, bytes, ordinals) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn host_free(self, addr: u64) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.host_free(addr) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn host_unregister(self, addr: u64) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.host_unregister(addr) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn stream_destroy(self, stream: NativeStream) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.stream_destroy(stream) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn stream_query(self, stream: NativeStream) -> Result<Progress> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.stream_query(stream) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn stream_synchronize(self, stream: NativeStream) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.stream_synchronize(stream) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn stream_wait_event(self, stream: NativeStream, event: NativeEvent) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.stream_wait_event(stream, event) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn stream_write_word(self, stream: NativeStream, addr: u64, value: u64) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.stream_write_word(stream, addr, value) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn stream_wait_word(self, stream: NativeStream, addr: u64, value: u64) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.stream_wait_word(stream, addr, value) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn host_function(self, stream: NativeStream, call: HostFunction) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.host_function(stream, call) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn event_destroy(self, event: NativeEvent) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.event_destroy(event) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn event_record(self, event: NativeEvent, stream: NativeStream) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.event_record(event, stream) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn event_query(self, event: NativeEvent) -> Result<Progress> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.event_query(event) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn event_synchronize(self, event: NativeEvent) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.event_synchronize(event) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn event_elapsed(self, start: NativeEvent, end: NativeEvent) -> Result<i64> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.event_elapsed(start, end) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn module_unload(self, module: NativeModule) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.module_unload(module) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn module_function(self, module: NativeModule, name: &str) -> Result<NativeFunction> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.module_function(module, name, &[]) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn function_info(self, function: NativeFunction) -> Result<FunctionInfo> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.function_info(function) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn function_allow_shared(self, function: NativeFunction, bytes: u32) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.function_allow_shared(function, bytes) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn graph_destroy(self, graph: NativeGraph) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.graph_destroy(graph) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn graph_add_child(
        self,
        graph: NativeGraph,
        after: &[NativeNode],
        child: NativeGraph,
    ) -> Result<NativeNode> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.graph_add_child(graph, after, child) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn graph_add_event(
        self,
        graph: NativeGraph,
        after: &[NativeNode],
        event: NativeEvent,
    ) -> Result<NativeNode> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.graph_add_event(graph, after, event) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn graph_add_host(
        self,
        graph: NativeGraph,
        after: &[NativeNode],
        call: std::sync::Arc<dyn Fn() + Send + Sync>,
    ) -> Result<NativeNode> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.graph_add_host(graph, after, call) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn graph_add_empty(self, graph: NativeGraph, after: &[NativeNode]) -> Result<NativeNode> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.graph_add_empty(graph, after) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn condition_create(self, graph: NativeGraph) -> Result<NativeCondition> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.condition_create(graph) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn graph_add_conditional(
        self,
        graph: NativeGraph,
        after: &[NativeNode],
        condition: NativeCondition,
        kind: ConditionalKind,
    ) -> Result<(NativeNode, NativeGraph)> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.graph_add_conditional(graph, after, condition, kind) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn graph_nodes(self, graph: NativeGraph) -> Result<usize> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.graph_nodes(graph) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn graph_instantiate(self, graph: NativeGraph) -> Result<NativeGraphExec> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.graph_instantiate(graph) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn exec_destroy(self, exec: NativeGraphExec) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.exec_destroy(exec) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn exec_upload(self, exec: NativeGraphExec, stream: NativeStream) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.exec_upload(exec, stream) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn capture_begin(self, stream: NativeStream) -> Result<()> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.capture_begin(stream) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn capture_end(self, stream: NativeStream) -> Result<NativeGraph> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.capture_end(stream) }
    }

    /// See the trait's method.
    ///
    /// # Errors
    /// See the trait's method.
    pub fn is_capturing(self, stream: NativeStream) -> Result<bool> {
        // SAFETY: the maker of `self` vouches for the arguments.
        unsafe { self.0.is_capturing(stream) }
    }
}

impl Deref for Vouched<'_> {
    type Target = dyn CudaSlowOps;

    fn deref(&self) -> &(dyn CudaSlowOps + 'static) {
        self.0
    }
}

impl std::fmt::Debug for Vouched<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Vouched")
    }
}
