//! Handles, properties and descriptors of the driver interface.
//!
//! This module must not know managers.

use leasehold_core::Error;
use leasehold_hal::Binding;

/// Defines a handle type for one kind of Metal's objects.
macro_rules! native {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        leasehold_hal::native_handles! {
            $($(#[$doc])* $name;)*
        }

        $(
            impl From<$name> for NativeObject {
                fn from(handle: $name) -> Self {
                    Self::$name(handle)
                }
            }
        )*

        /// Any of the driver's objects, for [`release`](super::ops::ObjectOps::release).
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum NativeObject {
            $($(#[$doc])* $name($name),)*
        }

        impl NativeObject {
            /// The handle's number.
            #[must_use]
            pub fn number(self) -> u64 {
                match self {
                    $(Self::$name(handle) => handle.0,)*
                }
            }
        }
    };
}

native! {
    /// An `MTLDevice`.
    NativeDevice;
    /// An `MTLCommandQueue`.
    NativeQueue;
    /// An `MTLCommandBuffer`.
    NativeCommandBuffer;
    /// An `MTLComputeCommandEncoder`.
    NativeComputeEncoder;
    /// An `MTLBlitCommandEncoder`.
    NativeBlitEncoder;
    /// An `MTLLibrary`.
    NativeLibrary;
    /// An `MTLFunction`.
    NativeFunction;
    /// An `MTLComputePipelineState`.
    NativePipeline;
    /// An `MTLHeap`.
    NativeHeap;
    /// An `MTLBuffer`.
    NativeBuffer;
    /// An `MTLEvent`.
    NativeEvent;
    /// An `MTLSharedEvent`.
    NativeSharedEvent;
    /// An `MTLFence`.
    NativeFence;
    /// An `MTLResidencySet`.
    NativeResidencySet;
    /// An `MTLCounterSampleBuffer`.
    NativeSampleBuffer;
    /// An `MTLIndirectCommandBuffer`.
    NativeIndirect;
    /// An `MTLCaptureScope`.
    NativeCaptureScope;
}

/// An encoder of either kind, for the calls of `MTLCommandEncoder` and for fences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NativeEncoder {
    /// A compute encoder.
    Compute(NativeComputeEncoder),
    /// A blit encoder.
    Blit(NativeBlitEncoder),
}

impl From<NativeComputeEncoder> for NativeEncoder {
    fn from(encoder: NativeComputeEncoder) -> Self {
        Self::Compute(encoder)
    }
}

impl From<NativeBlitEncoder> for NativeEncoder {
    fn from(encoder: NativeBlitEncoder) -> Self {
        Self::Blit(encoder)
    }
}

/// An event of either kind, for waits and signals of command buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AnyEvent {
    /// An event of one device.
    Event(NativeEvent),
    /// An event that the host also reads and signals.
    Shared(NativeSharedEvent),
}

impl From<NativeEvent> for AnyEvent {
    fn from(event: NativeEvent) -> Self {
        Self::Event(event)
    }
}

impl From<NativeSharedEvent> for AnyEvent {
    fn from(event: NativeSharedEvent) -> Self {
        Self::Shared(event)
    }
}

/// An `MTLAllocation`: a member of a residency set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Allocation {
    /// A heap, with all its buffers.
    Heap(NativeHeap),
    /// A buffer outside of any heap.
    Buffer(NativeBuffer),
}

/// A device's properties, as the driver reports them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceProperties {
    /// The product's name: `name`.
    pub name: String,
    /// A number that identifies the device until the machine restarts: `registryID`.
    pub registry_id: u64,
    /// The architecture's name: `architecture.name`. `None` if `architecture` is null, as on
    /// virtual machines.
    pub architecture: Option<String>,
    /// The newest `MTLGPUFamilyApple` that the device supports, as in 9; 0 for none.
    pub apple_family: u32,
    /// The newest `MTLGPUFamilyMac` that the device supports; 0 for none.
    pub mac_family: u32,
    /// The newest `MTLGPUFamilyCommon` that the device supports; 0 for none.
    pub common_family: u32,
    /// The newest `MTLGPUFamilyMetal` that the device supports, as in 3; 0 for none.
    pub metal_family: u32,
    /// Device and host share one memory: `hasUnifiedMemory`.
    pub unified_memory: bool,
    /// Bytes that the device can use without a loss of performance:
    /// `recommendedMaxWorkingSetSize`.
    pub recommended_working_set: u64,
    /// The most bytes of one buffer: `maxBufferLength`.
    pub max_buffer: u64,
    /// The most threads of a threadgroup in each direction: `maxThreadsPerThreadgroup`.
    pub max_threads: [u32; 3],
    /// Bytes of threadgroup memory of a threadgroup: `maxThreadgroupMemoryLength`.
    pub max_threadgroup_memory: u32,
    /// The group of devices with fast links, 0 for none: `peerGroupID`.
    pub peer_group: u64,
    /// The device saves energy rather than time: `isLowPower`.
    pub low_power: bool,
    /// The device drives no display: `isHeadless`.
    pub headless: bool,
    /// Residency sets exist (macOS 15).
    pub residency_sets: bool,
    /// Counters can be sampled at the boundaries of a pass: `supportsCounterSampling`.
    pub stage_counters: bool,
}

impl DeviceProperties {
    /// Whether this is the virtual device of a virtual machine, `Apple Paravirtual device`.
    #[must_use]
    pub fn is_paravirtual(&self) -> bool {
        self.name.contains("Paravirtual")
    }

    /// Whether indirect command buffers are reliable: real devices from `Apple9` on. Earlier ones
    /// need a dispatch of no threads with each pipeline first.
    #[must_use]
    pub fn has_safe_indirect(&self) -> bool {
        self.apple_family >= 9 && !self.is_paravirtual()
    }

    /// The names of kernel architectures that the device runs, the most specific first:
    /// `mps/apple9`, `mps/apple8`, …, `mps/mac2`, `mps/metal3`, `mps`.
    #[must_use]
    pub fn kernel_architectures(&self) -> Vec<String> {
        let families =
            [("apple", self.apple_family), ("mac", self.mac_family), ("metal", self.metal_family)];
        let each = |(name, newest): (&str, u32)| {
            // The families `Metal` begin with 3.
            let oldest = if name == "metal" { 3 } else { 1 };
            (oldest..=newest).rev().map(move |n| format!("mps/{name}{n}")).collect::<Vec<_>>()
        };
        let mut names: Vec<String> = families.into_iter().flat_map(each).collect();
        names.push("mps".to_owned());
        names
    }

    /// The largest number of a family and of bytes that a plausible device has.
    const FAMILY_MAX: u32 = 99;
    const BYTES_MAX: u64 = 1 << 50;

    /// Refuses properties that no device can have, because later computations rely on them.
    ///
    /// # Errors
    /// `Unavailable`, with the implausible property.
    pub fn check(&self, ordinal: u32) -> leasehold_core::Result<()> {
        let refuse = |what: String| {
            let text = format!("Metal: the driver says of device {ordinal} {what}");
            Err(Error::Unavailable(text.into()))
        };
        let families = [self.apple_family, self.mac_family, self.common_family, self.metal_family];
        if let Some(family) = families.into_iter().find(|&f| f > Self::FAMILY_MAX) {
            return refuse(format!("that its family is {family}"));
        }
        let bytes = self.recommended_working_set.max(self.max_buffer);
        if bytes > Self::BYTES_MAX {
            return refuse(format!("that it has {bytes} bytes of memory"));
        }
        if self.max_buffer == 0 || self.max_threads.contains(&0) {
            return refuse("that it can hold no buffer or run no thread".to_owned());
        }
        Ok(())
    }
}

/// The place of memory: `MTLStorageMode`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Storage {
    /// Memory that host and device reach: `MTLStorageModeShared`.
    #[default]
    Shared,
    /// Memory that only the device reaches: `MTLStorageModePrivate`.
    Private,
}

/// The options of a buffer or heap: `MTLResourceOptions`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct MemoryOptions {
    /// The place of the memory.
    pub storage: Storage,
    /// The driver orders accesses between encoders: `MTLHazardTrackingModeTracked`. The runtime
    /// orders its own, so its memory is untracked.
    pub tracked: bool,
    /// The host writes and never reads: `MTLCPUCacheModeWriteCombined`.
    pub write_combined: bool,
}

/// The description of a heap: `MTLHeapDescriptor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HeapDesc {
    /// Bytes.
    pub size: u64,
    /// The options of the heap and all its buffers.
    pub options: MemoryOptions,
    /// The caller places the buffers (`MTLHeapTypePlacement`); otherwise the driver does.
    pub placement: bool,
}

/// Bytes and alignment of a buffer in a heap: `MTLSizeAndAlign`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SizeAlign {
    /// Bytes.
    pub size: u64,
    /// The alignment of the buffer's offset.
    pub align: u64,
}

/// The options of a command buffer: `MTLCommandBufferDescriptor`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CommandBufferDesc {
    /// The driver retains what the commands use. Without this the caller keeps it until completion.
    pub retained: bool,
    /// The driver finds out which encoder failed
    /// (`MTLCommandBufferErrorOptionEncoderExecutionStatus`).
    pub encoder_status: bool,
}

/// The options of a compute encoder: `MTLComputePassDescriptor`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ComputeDesc {
    /// Dispatches may overlap up to a barrier (`MTLDispatchTypeConcurrent`). Otherwise they run one
    /// after the other.
    pub concurrent: bool,
    /// The sample buffer, and the indices of the samples at the start and the end of the pass.
    pub samples: Option<(NativeSampleBuffer, u32, u32)>,
}

/// One dispatch.
#[derive(Debug, Clone, Copy)]
pub struct Dispatch<'a> {
    /// Threadgroups of the grid in each direction.
    pub groups: [u32; 3],
    /// Threads of a threadgroup in each direction.
    pub threads: [u32; 3],
    /// The parts of the bound buffers that the kernel touches, by buffer index, with the addresses
    /// of [`buffer_address`](super::ops::MemoryOps::buffer_address). Only the simulated driver uses
    /// them, for checks and for its kernels.
    pub bindings: &'a [Binding],
}

/// The state of a command buffer: `MTLCommandBufferStatus`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    /// The command buffer is being encoded.
    NotEnqueued,
    /// The command buffer has its place in the queue and is being encoded.
    Enqueued,
    /// The command buffer was committed.
    Committed,
    /// The driver has resolved the command buffer's dependencies.
    Scheduled,
    /// All work is over.
    Completed,
    /// The work failed. No signal of the command buffer happens.
    Error,
}

impl Status {
    /// Whether the work is over or will never run.
    #[must_use]
    pub fn is_over(self) -> bool {
        self >= Self::Completed
    }
}

/// The outcome of a command buffer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Completion {
    /// The error's code (`MTLCommandBufferError`) and text; `None` after success.
    pub error: Option<(i32, String)>,
    /// The start of the work on the device, in nanoseconds of the host's clock: `GPUStartTime`.
    pub started: u64,
    /// The end of the work: `GPUEndTime`.
    pub ended: u64,
}

/// Codes of `MTLCommandBufferError`.
pub mod code {
    /// A failure inside the driver.
    pub const INTERNAL: i32 = 1;
    /// The work ran too long.
    pub const TIMEOUT: i32 = 2;
    /// The work touched an address without memory.
    pub const PAGE_FAULT: i32 = 3;
    /// The process may not submit any more.
    pub const ACCESS_REVOKED: i32 = 4;
    /// The process may not submit now.
    pub const NOT_PERMITTED: i32 = 7;
    /// The memory that the work uses does not fit.
    pub const OUT_OF_MEMORY: i32 = 8;
    /// The work uses a released resource.
    pub const INVALID_RESOURCE: i32 = 9;
    /// The device is gone.
    pub const DEVICE_REMOVED: i32 = 11;

    /// The name of a code in Metal's header.
    #[must_use]
    pub fn name(code: i32) -> &'static str {
        match code {
            INTERNAL => "MTLCommandBufferErrorInternal",
            TIMEOUT => "MTLCommandBufferErrorTimeout",
            PAGE_FAULT => "MTLCommandBufferErrorPageFault",
            ACCESS_REVOKED => "MTLCommandBufferErrorAccessRevoked",
            NOT_PERMITTED => "MTLCommandBufferErrorNotPermitted",
            OUT_OF_MEMORY => "MTLCommandBufferErrorOutOfMemory",
            INVALID_RESOURCE => "MTLCommandBufferErrorInvalidResource",
            DEVICE_REMOVED => "MTLCommandBufferErrorDeviceRemoved",
            _ => "MTLCommandBufferError",
        }
    }
}

/// The options of a compilation: `MTLCompileOptions`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct CompileOptions {
    /// Arithmetic may deviate from IEEE 754 (`MTLMathModeFast`); otherwise it is exact
    /// (`MTLMathModeSafe`).
    pub fast_math: bool,
    /// Major and minor version of the language; `None` for the newest.
    pub language: Option<(u8, u8)>,
    /// Names and values of preprocessor macros.
    pub macros: Vec<(String, String)>,
}

/// The options of a compute pipeline: `MTLComputePipelineDescriptor`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct PipelineDesc {
    /// The name in captures and errors.
    pub label: String,
    /// Indirect command buffers may use the pipeline.
    pub indirect: bool,
    /// The most threads of a threadgroup; 0 leaves the choice to the driver.
    pub max_threads: u32,
}

/// The limits of a pipeline.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PipelineInfo {
    /// The most threads of a threadgroup: `maxTotalThreadsPerThreadgroup`.
    pub max_threads: u32,
    /// Threads that run in step: `threadExecutionWidth`.
    pub simd_width: u32,
    /// Bytes of threadgroup memory that the code itself declares: `staticThreadgroupMemoryLength`.
    pub threadgroup_memory: u32,
}

/// One command of an indirect command buffer.
#[derive(Debug, Clone, Copy)]
pub struct IndirectCommand<'a> {
    /// The pipeline, made for indirect use.
    pub pipeline: NativePipeline,
    /// Buffers with byte offsets, by index.
    pub buffers: &'a [(NativeBuffer, u64)],
    /// The grid, and the touched parts of the buffers.
    pub dispatch: Dispatch<'a>,
    /// The command waits for all earlier ones of the buffer: `setBarrier`.
    pub barrier: bool,
}

/// The use of a resource that no encoder binds: `MTLResourceUsage`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usage {
    /// Reads only.
    Read,
    /// Reads and writes.
    ReadWrite,
}

/// A function that the driver calls once, on a thread of its own, when a command buffer is over.
/// The function must not block, must not submit, and must not release the last reference to a
/// queue.
pub type CompletedHandler = Box<dyn FnOnce(&Completion) + Send>;

/// A function that the driver calls once, on a thread of its own, with the value that a shared
/// event has reached. The rules of [`CompletedHandler`] hold.
pub type SignaledHandler = Box<dyn FnOnce(u64) + Send>;
