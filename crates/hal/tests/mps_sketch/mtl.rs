//! The part of Metal that the sketch uses: structs with the methods and names of `objc2-metal`, and
//! their `Send` and `Sync` properties. Nothing is computed. Calls are recorded, the API's own rules
//! are checked, and committed buffers complete on request.

#![expect(non_snake_case, reason = "the names are those of objc2-metal")]
#![expect(
    clippy::arc_with_non_send_sync,
    reason = "stands for retained objects that must not cross threads"
)]

use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use std::collections::VecDeque;
use std::marker::PhantomData;

/// `objc2::rc::Retained`: like `Arc`, it crosses threads only if its content may.
pub type Retained<T> = Arc<T>;
/// `MTLCommandBufferHandler`: called on a thread of Metal.
pub type Handler = Box<dyn FnOnce(&Completed) + Send>;

/// Marks protocols that `objc2-metal` does not declare `Send` or `Sync`.
type NotSend = PhantomData<*const ()>;

/// The properties of a command buffer that a completion handler reads.
pub struct Completed {
    /// `status() == Error`, then `error()`.
    pub error: Option<String>,
}

/// The recorded calls.
#[derive(Default)]
pub struct World {
    log: Mutex<Vec<String>>,
    broken_rules: Mutex<Vec<String>>,
    committed: Mutex<VecDeque<Committed>>,
    ids: AtomicU64,
}

struct Committed {
    queue: u64,
    waits: Vec<(Retained<MTLSharedEvent>, u64)>,
    signals: Vec<(Retained<MTLSharedEvent>, u64)>,
    handlers: Vec<Handler>,
}

impl World {
    fn say(&self, what: String) {
        self.log.lock().push(what);
    }

    fn broken(&self, rule: String) {
        self.broken_rules.lock().push(rule);
    }

    fn id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The calls since the last query.
    pub fn calls(&self) -> Vec<String> {
        std::mem::take(&mut *self.log.lock())
    }

    /// Broken rules of Metal; a real one would have ended the process.
    pub fn broken_rules(&self) -> Vec<String> {
        self.broken_rules.lock().clone()
    }

    /// The number of committed buffers that are not complete.
    pub fn in_flight(&self) -> usize {
        self.committed.lock().len()
    }

    /// Completes the next committed buffer that can run: the first of its queue, with all waits
    /// reached. `false` if none can.
    pub fn run_one(&self, error: Option<&str>) -> bool {
        let next = {
            let mut committed = self.committed.lock();
            let ready = |i: usize| {
                let c = &committed[i];
                committed.iter().position(|o| o.queue == c.queue) == Some(i)
                    && c.waits.iter().all(|(e, v)| e.signaledValue() >= *v)
            };
            let Some(at) = (0..committed.len()).find(|&i| ready(i)) else { return false };
            committed.remove(at)
        };
        let Some(next) = next else { return false };
        if error.is_none() {
            // As in Metal, an error omits the signals.
            next.signals.iter().for_each(|(e, v)| e.setSignaledValue(*v));
        }
        let done = Completed { error: error.map(str::to_owned) };
        // Metal's own thread.
        std::thread::spawn(move || next.handlers.into_iter().for_each(|h| h(&done)))
            .join()
            .expect("a handler panicked");
        true
    }

    /// Completes all buffers that can run.
    pub fn run(&self) {
        while self.run_one(None) {}
    }
}

/// `MTLDevice`: `Send + Sync`.
pub struct MTLDevice(pub Arc<World>);

impl MTLDevice {
    pub fn newCommandQueueWithMaxCommandBufferCount(
        &self,
        count: usize,
    ) -> Option<Retained<MTLCommandQueue>> {
        self.0.say(format!("newCommandQueue {count}"));
        Some(Arc::new(MTLCommandQueue { world: self.0.clone(), id: self.0.id() }))
    }

    pub fn newSharedEvent(&self) -> Option<Retained<MTLSharedEvent>> {
        Some(Arc::new(MTLSharedEvent { id: self.0.id(), value: AtomicU64::new(0) }))
    }

    pub fn newFence(&self) -> Option<Retained<MTLFence>> {
        Some(Arc::new(MTLFence))
    }

    /// A placement heap, shared storage, untracked hazards.
    pub fn newHeapWithDescriptor(&self, size: usize) -> Option<Retained<MTLHeap>> {
        self.0.say(format!("newHeap {size}"));
        Some(Arc::new(MTLHeap { size, world: self.0.clone(), marker: PhantomData }))
    }

    pub fn newComputePipelineState(
        &self,
        function: &str,
    ) -> Result<Retained<MTLComputePipelineState>, String> {
        if function.starts_with("missing") {
            return Err(format!("function {function} not found"));
        }
        Ok(Arc::new(MTLComputePipelineState { name: function.to_owned() }))
    }
}

/// `MTLCommandQueue`: `Send + Sync`.
pub struct MTLCommandQueue {
    world: Arc<World>,
    id: u64,
}

impl MTLCommandQueue {
    pub fn commandBufferWithUnretainedReferences(&self) -> Option<Retained<MTLCommandBuffer>> {
        let id = self.world.id();
        self.world.say(format!("commandBuffer {id}"));
        let state = BufferState {
            encoder: false,
            committed: false,
            waits: vec![],
            signals: vec![],
            handlers: vec![],
        };
        let inner =
            Inner { world: self.world.clone(), id, queue: self.id, state: Mutex::new(state) };
        // Not `Send` but retained nevertheless, like Objective-C objects.
        let buffer = Arc::new(MTLCommandBuffer { inner: Arc::new(inner), marker: PhantomData });
        Some(buffer)
    }
}

struct Inner {
    world: Arc<World>,
    id: u64,
    queue: u64,
    state: Mutex<BufferState>,
}

struct BufferState {
    encoder: bool,
    committed: bool,
    waits: Vec<(Retained<MTLSharedEvent>, u64)>,
    signals: Vec<(Retained<MTLSharedEvent>, u64)>,
    handlers: Vec<Handler>,
}

impl Inner {
    fn encoder(self: &Arc<Self>, kind: &'static str, what: String) -> Encoder {
        let mut state = self.state.lock();
        if state.encoder || state.committed {
            self.world.broken(format!(
                "{kind} encoder on buffer {} that is encoding or committed",
                self.id
            ));
        }
        state.encoder = true;
        self.world.say(format!("{what} on {}", self.id));
        Encoder { buffer: self.clone(), kind, ended: Mutex::new(false) }
    }

    fn between_encoders(&self, call: &str) {
        let state = self.state.lock();
        if state.encoder || state.committed {
            self.world
                .broken(format!("{call} on buffer {} that is encoding or committed", self.id));
        }
    }
}

/// `MTLCommandBuffer`: neither `Send` nor `Sync`.
pub struct MTLCommandBuffer {
    inner: Arc<Inner>,
    marker: NotSend,
}

impl MTLCommandBuffer {
    pub fn computeCommandEncoderConcurrent(&self) -> Option<Retained<MTLComputeCommandEncoder>> {
        Some(compute(self.inner.encoder("compute", "computeEncoder".to_owned())))
    }

    /// `computeCommandEncoderWithDescriptor` with a sample buffer attachment: samples at stage
    /// boundaries only.
    pub fn computeCommandEncoderSampling(
        &self,
        index: u64,
    ) -> Option<Retained<MTLComputeCommandEncoder>> {
        Some(compute(self.inner.encoder("compute", format!("computeEncoder sampling {index}"))))
    }

    pub fn blitCommandEncoder(&self) -> Option<Retained<MTLBlitCommandEncoder>> {
        let encoder = self.inner.encoder("blit", "blitEncoder".to_owned());
        let blit = Arc::new(MTLBlitCommandEncoder { encoder, marker: PhantomData });
        Some(blit)
    }

    pub fn encodeWaitForEvent_value(&self, event: &Retained<MTLSharedEvent>, value: u64) {
        self.inner.between_encoders("encodeWaitForEvent");
        self.inner.world.say(format!("wait event{} {value} on {}", event.id, self.inner.id));
        self.inner.state.lock().waits.push((event.clone(), value));
    }

    pub fn encodeSignalEvent_value(&self, event: &Retained<MTLSharedEvent>, value: u64) {
        self.inner.between_encoders("encodeSignalEvent");
        self.inner.world.say(format!("signal event{} {value} on {}", event.id, self.inner.id));
        self.inner.state.lock().signals.push((event.clone(), value));
    }

    pub fn addCompletedHandler(&self, handler: Handler) {
        let mut state = self.inner.state.lock();
        if state.committed {
            self.inner.world.broken("addCompletedHandler after commit".to_owned());
        }
        state.handlers.push(handler);
    }

    pub fn commit(&self) {
        self.inner.between_encoders("commit");
        let mut state = self.inner.state.lock();
        state.committed = true;
        self.inner.world.say(format!("commit {}", self.inner.id));
        self.inner.world.committed.lock().push_back(Committed {
            queue: self.inner.queue,
            waits: std::mem::take(&mut state.waits),
            signals: std::mem::take(&mut state.signals),
            handlers: std::mem::take(&mut state.handlers),
        });
    }
}

impl Drop for MTLCommandBuffer {
    fn drop(&mut self) {
        let state = self.inner.state.lock();
        if state.encoder {
            self.inner.world.broken(format!("buffer {} dropped while encoding", self.inner.id));
        }
    }
}

/// The common part of all encoders.
struct Encoder {
    buffer: Arc<Inner>,
    kind: &'static str,
    ended: Mutex<bool>,
}

impl Encoder {
    fn say(&self, what: String) {
        if *self.ended.lock() {
            self.buffer.world.broken(format!("{what} after endEncoding"));
        }
        self.buffer.world.say(what);
    }

    fn end(&self) {
        *self.ended.lock() = true;
        self.buffer.state.lock().encoder = false;
        self.buffer.world.say("endEncoding".to_owned());
    }
}

impl Drop for Encoder {
    fn drop(&mut self) {
        if !*self.ended.lock() {
            self.buffer.world.broken(format!("{} encoder dropped without endEncoding", self.kind));
        }
    }
}

fn compute(encoder: Encoder) -> Retained<MTLComputeCommandEncoder> {
    Arc::new(MTLComputeCommandEncoder { encoder, marker: PhantomData })
}

/// `MTLComputeCommandEncoder`: neither `Send` nor `Sync`.
pub struct MTLComputeCommandEncoder {
    encoder: Encoder,
    marker: NotSend,
}

impl MTLComputeCommandEncoder {
    pub fn setComputePipelineState(&self, state: &MTLComputePipelineState) {
        self.encoder.say(format!("pipeline {}", state.name));
    }

    pub fn setBuffer_offset_atIndex(&self, buffer: &MTLBuffer, offset: usize, index: usize) {
        if offset >= buffer.length() {
            self.encoder
                .buffer
                .world
                .broken(format!("offset {offset} of a buffer of {}", buffer.length()));
        }
        self.encoder.say(format!("buffer +{offset} at {index}"));
    }

    pub fn setBytes_atIndex(&self, bytes: &[u8], index: usize) {
        if bytes.len() > 4096 || bytes.is_empty() {
            self.encoder.buffer.world.broken(format!("setBytes of {}", bytes.len()));
        }
        self.encoder.say(format!("bytes {} at {index}", bytes.len()));
    }

    pub fn setThreadgroupMemoryLength_atIndex(&self, length: usize, index: usize) {
        self.encoder.say(format!("threadgroup memory {length} at {index}"));
    }

    pub fn dispatchThreadgroups_threadsPerThreadgroup(&self, groups: [u32; 3], threads: [u32; 3]) {
        if groups.contains(&0) || threads.contains(&0) {
            self.encoder.buffer.world.broken("a dispatch of nothing".to_owned());
        }
        self.encoder.say(format!("dispatch {groups:?} {threads:?}"));
    }

    pub fn memoryBarrierWithScopeBuffers(&self) {
        self.encoder.say("barrier".to_owned());
    }

    pub fn updateFence(&self, _: &MTLFence) {
        self.encoder.say("updateFence".to_owned());
    }

    pub fn waitForFence(&self, _: &MTLFence) {
        self.encoder.say("waitForFence".to_owned());
    }

    pub fn endEncoding(&self) {
        self.encoder.end();
    }
}

/// `MTLBlitCommandEncoder`: neither `Send` nor `Sync`.
pub struct MTLBlitCommandEncoder {
    encoder: Encoder,
    marker: NotSend,
}

impl MTLBlitCommandEncoder {
    pub fn copyFromBuffer(
        &self,
        _: &MTLBuffer,
        from: usize,
        _: &MTLBuffer,
        to: usize,
        size: usize,
    ) {
        self.encoder.say(format!("copy +{from} to +{to} {size}"));
    }

    /// Metal fills with single bytes only.
    pub fn fillBuffer_range_value(&self, _: &MTLBuffer, range: std::ops::Range<usize>, value: u8) {
        self.encoder.say(format!("fill {range:?} {value}"));
    }

    pub fn updateFence(&self, _: &MTLFence) {
        self.encoder.say("updateFence".to_owned());
    }

    pub fn waitForFence(&self, _: &MTLFence) {
        self.encoder.say("waitForFence".to_owned());
    }

    pub fn endEncoding(&self) {
        self.encoder.end();
    }
}

/// `MTLSharedEvent`: `Send + Sync`.
pub struct MTLSharedEvent {
    id: u64,
    value: AtomicU64,
}

impl MTLSharedEvent {
    pub fn signaledValue(&self) -> u64 {
        self.value.load(Ordering::Acquire)
    }

    pub fn setSignaledValue(&self, value: u64) {
        self.value.fetch_max(value, Ordering::AcqRel);
    }
}

/// `MTLFence`: `Send + Sync`.
pub struct MTLFence;

/// `MTLComputePipelineState`: `Send + Sync`.
pub struct MTLComputePipelineState {
    name: String,
}

impl MTLComputePipelineState {
    pub fn maxTotalThreadsPerThreadgroup(&self) -> usize {
        1024
    }
}

/// `MTLHeap`: neither `Send` nor `Sync`.
pub struct MTLHeap {
    size: usize,
    world: Arc<World>,
    marker: NotSend,
}

impl MTLHeap {
    pub fn newBufferWithLength_offset(
        &self,
        length: usize,
        offset: usize,
    ) -> Option<Retained<MTLBuffer>> {
        if length == 0 || offset + length > self.size {
            return None;
        }
        self.world.say(format!("newBuffer {length} +{offset}"));
        let memory = vec![Page { _bytes: [0; PAGE] }; length.div_ceil(PAGE)].into_boxed_slice();
        let buffer =
            Arc::new(MTLBuffer { memory: Mutex::new(memory), length, marker: self.marker });
        Some(buffer)
    }
}

/// `MTLBuffer`: neither `Send` nor `Sync`.
pub struct MTLBuffer {
    memory: Mutex<Box<[Page]>>,
    length: usize,
    marker: NotSend,
}

const PAGE: usize = 16 << 10;

/// Heaps begin at page boundaries.
#[derive(Clone)]
#[repr(align(16384))]
struct Page {
    _bytes: [u8; PAGE],
}

impl MTLBuffer {
    pub fn contents(&self) -> *mut u8 {
        self.memory.lock().as_mut_ptr().cast()
    }

    pub fn length(&self) -> usize {
        self.length
    }
}
