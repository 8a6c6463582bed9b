//! The methods of Foundation and Metal that the driver uses, with Apple's rules of ownership: names
//! that begin with `new`, `alloc`, `copy` or `init` give a reference away, the others leave it to
//! the pool.

use crate::runtime::{_Block_copy, Block, Id, Imp, record};
use leasehold_core::sync::atomic::{AtomicBool, AtomicI64, AtomicPtr, Ordering};
use leasehold_core::sync::{Mutex, OnceLock};
use objc2_foundation::NSRange;
use objc2_metal::{MTLSize, MTLSizeAndAlign};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::slice;

/// The next method that can fail does, or returns nil.
static FAILS: AtomicBool = AtomicBool::new(false);
/// The status of all command buffers.
static STATUS: AtomicI64 = AtomicI64::new(0);
/// Selectors that no object has, as on an older system.
static MISSING: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());
/// Whether devices have an architecture.
static NAMELESS: AtomicBool = AtomicBool::new(false);

/// Makes the next method that can fail do so.
pub fn fail_next() {
    FAILS.store(true, Ordering::Relaxed);
}

fn fails() -> bool {
    FAILS.swap(false, Ordering::Relaxed)
}

/// Sets the status of all command buffers.
pub fn set_status(status: i64) {
    STATUS.store(status, Ordering::Relaxed);
}

/// Makes the device one of an older system, without these selectors.
pub fn set_missing(selectors: &[&'static str]) {
    *MISSING.lock() = selectors.to_vec();
}

/// Makes the device's architecture nil, as on a virtual machine.
pub fn set_nameless(nameless: bool) {
    NAMELESS.store(nameless, Ordering::Relaxed);
}

/// Runs the blocks that a command buffer or shared event holds, and lets go of them.
///
/// # Safety
/// - `number` is a live command buffer, or an event, of this process.
pub unsafe fn run_block(number: u64, value: Option<u64>) {
    let own = Id(number as *mut _);
    let block = own.with(|c| std::mem::take(&mut c.block)) as *mut Block;
    assert!(!block.is_null(), "no block was added");
    // SAFETY: the block is live and takes these arguments.
    unsafe {
        match value {
            None => {
                let call: unsafe extern "C-unwind" fn(*mut Block, Id) =
                    std::mem::transmute((*block).invoke);
                call(block, own);
            }
            Some(value) => {
                let call: unsafe extern "C-unwind" fn(*mut Block, Id, u64) =
                    std::mem::transmute((*block).invoke);
                call(block, own, value);
            }
        }
        crate::runtime::_Block_release(block.cast());
    }
}

fn auto(name: &str) -> Id {
    Id::new(name).autorelease()
}

/// A new object, or nil if the call is to fail.
fn made(name: &str) -> Id {
    if fails() { Id::NIL } else { Id::new(name) }
}

fn string(text: &str) -> Id {
    let string = auto("NSString");
    string.with(|c| c.bytes = [text.as_bytes(), b"\0"].concat());
    string
}

fn text_of(string: Id) -> String {
    string.with(|c| String::from_utf8_lossy(c.bytes.strip_suffix(b"\0").unwrap_or(&c.bytes)).into())
}

fn error() -> Id {
    let error = auto("NSError");
    error.with(|c| c.value = 7);
    error
}

/// A new object, or an error of Metal.
///
/// # Safety
/// - `to` is null or a place for an error.
unsafe fn made_or(name: &str, to: *mut Id) -> Id {
    if !fails() {
        return Id::new(name);
    }
    // SAFETY: the caller vouches for the place.
    unsafe {
        if let Some(to) = to.as_mut() {
            *to = error();
        }
    }
    Id::NIL
}

/// The value of an argument in a record.
trait Show {
    fn show(&self) -> String;
}

macro_rules! shown {
    ($($ty:ty),*) => {
        $(impl Show for $ty {
            fn show(&self) -> String {
                self.to_string()
            }
        })*
    };
}
shown!(usize, u64, u32, u8, isize, bool);

impl Show for Id {
    fn show(&self) -> String {
        match self.class_name() {
            None => "nil".to_owned(),
            Some("NSString") => format!("{:?}", text_of(*self)),
            Some(name) => name.to_owned(),
        }
    }
}

impl Show for MTLSize {
    fn show(&self) -> String {
        format!("{}x{}x{}", self.width, self.height, self.depth)
    }
}

impl Show for NSRange {
    fn show(&self) -> String {
        format!("{}+{}", self.location, self.length)
    }
}

impl<T> Show for *const T {
    fn show(&self) -> String {
        if self.is_null() { "null" } else { "pointer" }.to_owned()
    }
}

impl<T> Show for *mut T {
    fn show(&self) -> String {
        self.cast_const().show()
    }
}

fn note(this: Id, selector: &str, arguments: &[String]) {
    let name = this.class_name().unwrap_or("nil");
    // Those of NSObject say nothing of Metal.
    let general = ["alloc", "new", "init", "respondsToSelector:"].contains(&selector);
    if name.starts_with("MTL") && !general {
        let space = if arguments.is_empty() { "" } else { " " };
        record(format!("{name} {selector}{space}{}", arguments.join(" ")));
    }
}

/// The method of messages to nil, and of those that no class has.
pub fn nothing() -> Imp {
    unsafe extern "C-unwind" fn nothing(_: Id, _: *const c_char) -> usize {
        0
    }
    nothing as *const c_void
}

struct Method(&'static [&'static str], Imp);
// SAFETY: the address of a function.
unsafe impl Send for Method {}
// SAFETY: the address of a function.
unsafe impl Sync for Method {}

type Table = HashMap<&'static str, Vec<Method>>;

/// The method of a class for a selector.
pub fn method(class: &str, selector: &str) -> Option<Imp> {
    static TABLE: OnceLock<Table> = OnceLock::new();
    let methods = TABLE.get_or_init(table).get(selector)?;
    methods.iter().find(|m| m.0 == ["*"] || m.0.contains(&class)).map(|m| m.1)
}

macro_rules! methods {
    ($($($class:literal)|+ $selector:literal ($this:ident $(, $arg:ident: $ty:ty)*) $(-> $ret:ty)? $body:block)*) => {
        fn table() -> Table {
            let mut table = Table::new();
            $({
                unsafe extern "C-unwind" fn own($this: Id, _: *const c_char $(, $arg: $ty)*) $(-> $ret)? {
                    note($this, $selector, &[$($arg.show()),*]);
                    $body
                }
                table.entry($selector).or_default().push(Method(&[$($class),+], own as *const c_void));
            })*
            table
        }
    };
}

methods! {
    // ---- NSObject
    "*" "alloc" (this) -> Id { Id::new(this.class_name().unwrap_or("?")) }
    "*" "new" (this) -> Id { Id::new(this.class_name().unwrap_or("?")) }
    "*" "init" (this) -> Id { this }
    "*" "respondsToSelector:" (_this, selector: *const c_char) -> bool {
        // SAFETY: selectors are strings.
        let selector = unsafe { CStr::from_ptr(selector) }.to_str().unwrap_or("?");
        !MISSING.lock().contains(&selector)
    }

    // ---- Foundation
    "NSString" "initWithBytes:length:encoding:" (this, bytes: *const u8, length: usize, _encoding: u32) -> Id {
        // SAFETY: the caller gives so many bytes.
        let bytes = unsafe { slice::from_raw_parts(bytes, length) };
        this.with(|c| c.bytes = [bytes, b"\0"].concat());
        this
    }
    "NSString" "UTF8String" (this) -> *const u8 { this.with(|c| c.bytes.as_ptr()) }
    "NSString" "lengthOfBytesUsingEncoding:" (this, _encoding: u32) -> usize { this.with(|c| c.bytes.len() - 1) }
    "NSString" "isEqual:" (this, other: Id) -> bool { text_of(this) == text_of(other) }
    "NSString" "isEqualToString:" (this, other: Id) -> bool { text_of(this) == text_of(other) }
    "NSArray" "count" (this) -> usize { this.with(|c| c.items.len()) }
    "NSArray" "objectAtIndex:" (this, index: usize) -> Id { this.with(|c| c.items[index]) }
    "NSArray" "getObjects:" (this, to: *mut Id) {
        let items = this.with(|c| c.items.clone());
        // SAFETY: the caller has room for them.
        unsafe { to.copy_from_nonoverlapping(items.as_ptr(), items.len()) };
    }
    "NSArray" "countByEnumeratingWithState:objects:count:" (this, state: *mut [usize; 8], to: *mut Id, room: usize) -> usize {
        // SAFETY: the caller gives a state of zeros at first, and room for so many objects. No
        // array changes, so the word that tells of changes may be any.
        unsafe {
            let state = &mut *state;
            let items = this.with(|c| c.items[state[0]..].iter().take(room).copied().collect::<Vec<_>>());
            to.copy_from_nonoverlapping(items.as_ptr(), items.len());
            state[0] += items.len();
            state[1] = to as usize;
            state[2] = this.0 as usize;
            items.len()
        }
    }
    "NSDictionary" "initWithObjects:forKeys:count:" (this, objects: *const Id, keys: *const Id, count: usize) -> Id {
        // SAFETY: the caller gives so many of both.
        let (objects, keys) = unsafe { (slice::from_raw_parts(objects, count), slice::from_raw_parts(keys, count)) };
        this.with(|c| c.items = keys.iter().chain(objects).map(|i| i.retain()).collect());
        this
    }
    "NSData" "bytes" (this) -> *const u8 { this.with(|c| c.bytes.as_ptr()) }
    "NSData" "length" (this) -> usize { this.with(|c| c.bytes.len()) }
    "NSError" "code" (this) -> isize { this.with(|c| c.value as isize) }
    "NSError" "localizedDescription" (_this) -> Id { string("a stand-in's error") }
    "NSURL" "initFileURLWithFileSystemRepresentation:isDirectory:relativeToURL:" (this, path: *const c_char, _directory: bool, _base: Id) -> Id {
        // SAFETY: the caller gives a string.
        let path = unsafe { CStr::from_ptr(path) };
        record(format!("NSURL {}", path.to_string_lossy()));
        this
    }

    // ---- Devices
    "MTLDevice" "name" (_this) -> Id { string("Stand-in") }
    "MTLDevice" "registryID" (_this) -> u64 { 42 }
    "MTLDevice" "architecture" (_this) -> Id {
        if NAMELESS.load(Ordering::Relaxed) { Id::NIL } else { auto("MTLArchitecture") }
    }
    "MTLArchitecture" "name" (_this) -> Id { string("applegpu_s1") }
    "MTLDevice" "supportsFamily:" (_this, family: isize) -> bool {
        // Apple1 to Apple9, Mac2, Common1 to Common3, Metal3.
        (1001..=1009).contains(&family) || [2002, 3001, 3002, 3003, 5001].contains(&family)
    }
    "MTLDevice" "hasUnifiedMemory" (_this) -> bool { true }
    "MTLDevice" "recommendedMaxWorkingSetSize" (_this) -> u64 { 1 << 34 }
    "MTLDevice" "maxBufferLength" (_this) -> usize { 1 << 33 }
    "MTLDevice" "maxThreadsPerThreadgroup" (_this) -> MTLSize { MTLSize { width: 1024, height: 1023, depth: 1022 } }
    "MTLDevice" "maxThreadgroupMemoryLength" (_this) -> usize { 32 << 10 }
    "MTLDevice" "peerGroupID" (_this) -> u64 { 3 }
    "MTLDevice" "isLowPower" (_this) -> bool { false }
    "MTLDevice" "isHeadless" (_this) -> bool { true }
    "MTLDevice" "supportsCounterSampling:" (_this, point: usize) -> bool { point == 0 }
    "MTLDevice" "currentAllocatedSize" (_this) -> usize { 4096 }
    "MTLDevice" "sampleTimestamps:gpuTimestamp:" (_this, host: *mut u64, own: *mut u64) {
        // SAFETY: the caller gives two places.
        unsafe { (*host, *own) = (11, 12) };
    }

    // ---- Queues and command buffers
    "MTLDevice" "newCommandQueueWithMaxCommandBufferCount:" (_this, buffers: usize) -> Id { made("MTLCommandQueue") }
    "MTLCommandQueue" | "MTLCommandBuffer" | "MTLCaptureScope" | "MTLComputePipelineDescriptor" "setLabel:" (_this, label: Id) {}
    "MTLCommandQueue" "addResidencySet:" (_this, set: Id) {}
    "MTLCommandQueue" "removeResidencySet:" (_this, set: Id) {}
    "MTLCommandBufferDescriptor" "setRetainedReferences:" (_this, retained: bool) {}
    "MTLCommandBufferDescriptor" "setErrorOptions:" (_this, options: usize) {}
    "MTLCommandQueue" "commandBufferWithDescriptor:" (_this, description: Id) -> Id {
        if fails() { Id::NIL } else { auto("MTLCommandBuffer") }
    }
    "MTLCommandBuffer" "addCompletedHandler:" (this, block: *const c_void) {
        // SAFETY: the caller gives a block, which Metal copies.
        let block = unsafe { _Block_copy(block) };
        this.with(|c| c.block = block as usize);
    }
    "MTLCommandBuffer" "encodeWaitForEvent:value:" (_this, event: Id, value: u64) {}
    "MTLCommandBuffer" "encodeSignalEvent:value:" (_this, event: Id, value: u64) {}
    "MTLCommandBuffer" "commit" (_this) {}
    "MTLCommandBuffer" "status" (_this) -> usize { STATUS.load(Ordering::Relaxed) as usize }
    "MTLCommandBuffer" "error" (_this) -> Id { if STATUS.load(Ordering::Relaxed) == 5 { error() } else { Id::NIL } }
    "MTLCommandBuffer" "GPUStartTime" (_this) -> f64 { 1.5 }
    "MTLCommandBuffer" "GPUEndTime" (_this) -> f64 { 2.5 }
    "MTLCommandBuffer" "waitUntilCompleted" (_this) {}

    // ---- Encoders
    "MTLComputePassDescriptor" "computePassDescriptor" (_this) -> Id { auto("MTLComputePassDescriptor") }
    "MTLComputePassDescriptor" "setDispatchType:" (_this, kind: usize) {}
    "MTLComputePassDescriptor" "sampleBufferAttachments" (_this) -> Id { auto("MTLComputePassSampleBufferAttachmentDescriptorArray") }
    "MTLComputePassSampleBufferAttachmentDescriptorArray" "objectAtIndexedSubscript:" (_this, index: usize) -> Id {
        auto("MTLComputePassSampleBufferAttachmentDescriptor")
    }
    "MTLComputePassSampleBufferAttachmentDescriptor" "setSampleBuffer:" (_this, samples: Id) {}
    "MTLComputePassSampleBufferAttachmentDescriptor" "setStartOfEncoderSampleIndex:" (_this, index: usize) {}
    "MTLComputePassSampleBufferAttachmentDescriptor" "setEndOfEncoderSampleIndex:" (_this, index: usize) {}
    "MTLCommandBuffer" "computeCommandEncoderWithDescriptor:" (_this, description: Id) -> Id {
        if fails() { Id::NIL } else { auto("MTLComputeCommandEncoder") }
    }
    "MTLCommandBuffer" "blitCommandEncoder" (_this) -> Id {
        if fails() { Id::NIL } else { auto("MTLBlitCommandEncoder") }
    }
    "MTLComputeCommandEncoder" | "MTLBlitCommandEncoder" "endEncoding" (_this) {}
    "MTLComputeCommandEncoder" | "MTLBlitCommandEncoder" "waitForFence:" (_this, fence: Id) {}
    "MTLComputeCommandEncoder" | "MTLBlitCommandEncoder" "updateFence:" (_this, fence: Id) {}
    "MTLComputeCommandEncoder" | "MTLBlitCommandEncoder" "pushDebugGroup:" (_this, name: Id) {}
    "MTLComputeCommandEncoder" | "MTLBlitCommandEncoder" "popDebugGroup" (_this) {}
    "MTLComputeCommandEncoder" | "MTLIndirectComputeCommand" "setComputePipelineState:" (_this, pipeline: Id) {}
    "MTLComputeCommandEncoder" "setBuffer:offset:atIndex:" (_this, buffer: Id, offset: usize, index: usize) {}
    "MTLComputeCommandEncoder" "setBytes:length:atIndex:" (_this, bytes: *const u8, length: usize, index: usize) {
        // SAFETY: the caller gives so many bytes.
        record(format!("{:?}", unsafe { slice::from_raw_parts(bytes, length) }));
    }
    "MTLComputeCommandEncoder" "setThreadgroupMemoryLength:atIndex:" (_this, length: usize, index: usize) {}
    "MTLComputeCommandEncoder" "dispatchThreadgroups:threadsPerThreadgroup:" (_this, groups: MTLSize, threads: MTLSize) {}
    "MTLComputeCommandEncoder" "memoryBarrierWithScope:" (_this, scope: usize) {}
    "MTLComputeCommandEncoder" "useResource:usage:" (_this, resource: Id, usage: usize) {}
    "MTLComputeCommandEncoder" "useHeap:" (_this, heap: Id) {}
    "MTLComputeCommandEncoder" "executeCommandsInBuffer:withRange:" (_this, commands: Id, range: NSRange) {}
    "MTLBlitCommandEncoder" "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:"
        (_this, from: Id, from_offset: usize, to: Id, to_offset: usize, bytes: usize) {}
    "MTLBlitCommandEncoder" "fillBuffer:range:value:" (_this, to: Id, range: NSRange, value: u8) {}

    // ---- Libraries
    "MTLCompileOptions" "setMathMode:" (_this, mode: isize) {}
    "MTLCompileOptions" "setFastMathEnabled:" (_this, fast: bool) {}
    "MTLCompileOptions" "setLanguageVersion:" (_this, version: usize) {}
    "MTLCompileOptions" "setPreprocessorMacros:" (_this, macros: Id) {
        macros.with(|c| c.items.clone()).into_iter().for_each(|item| record(item.show()));
    }
    "MTLDevice" "newLibraryWithSource:options:error:" (_this, source: Id, options: Id, error: *mut Id) -> Id {
        // SAFETY: the caller gives a place.
        unsafe { made_or("MTLLibrary", error) }
    }
    "MTLDevice" "newLibraryWithURL:error:" (_this, url: Id, error: *mut Id) -> Id {
        // SAFETY: the caller gives a place.
        unsafe { made_or("MTLLibrary", error) }
    }
    "MTLLibrary" "functionNames" (_this) -> Id {
        let names = auto("NSArray");
        let each = ["one", "two"].map(|name| string(name).retain());
        names.with(|c| c.items = each.to_vec());
        names
    }
    "MTLLibrary" "newFunctionWithName:" (_this, name: Id) -> Id { made("MTLFunction") }
    "MTLComputePipelineDescriptor" "setComputeFunction:" (_this, function: Id) {}
    "MTLComputePipelineDescriptor" "setSupportIndirectCommandBuffers:" (_this, indirect: bool) {}
    "MTLComputePipelineDescriptor" "setMaxTotalThreadsPerThreadgroup:" (_this, threads: usize) {}
    "MTLDevice" "newComputePipelineStateWithDescriptor:options:reflection:error:"
        (_this, description: Id, options: usize, reflection: *mut Id, error: *mut Id) -> Id {
        // SAFETY: the caller gives a place.
        unsafe { made_or("MTLComputePipelineState", error) }
    }
    "MTLComputePipelineState" "maxTotalThreadsPerThreadgroup" (_this) -> usize { 512 }
    "MTLComputePipelineState" "threadExecutionWidth" (_this) -> usize { 32 }
    "MTLComputePipelineState" "staticThreadgroupMemoryLength" (_this) -> usize { 64 }

    // ---- Memory
    "MTLHeapDescriptor" "setSize:" (_this, size: usize) {}
    "MTLHeapDescriptor" | "MTLCounterSampleBufferDescriptor" "setStorageMode:" (_this, mode: usize) {}
    "MTLHeapDescriptor" "setHazardTrackingMode:" (_this, mode: usize) {}
    "MTLHeapDescriptor" "setCpuCacheMode:" (_this, mode: usize) {}
    "MTLHeapDescriptor" "setType:" (_this, kind: isize) {}
    "MTLDevice" "newHeapWithDescriptor:" (_this, description: Id) -> Id { made("MTLHeap") }
    "MTLHeap" "usedSize" (_this) -> usize { 21 }
    "MTLHeap" "maxAvailableSizeWithAlignment:" (_this, alignment: usize) -> usize { 22 }
    "MTLDevice" "heapBufferSizeAndAlignWithLength:options:" (_this, length: usize, options: usize) -> MTLSizeAndAlign {
        MTLSizeAndAlign { size: length + 1, align: 256 }
    }
    "MTLDevice" | "MTLHeap" "newBufferWithLength:options:" (_this, length: usize, options: usize) -> Id { made("MTLBuffer") }
    "MTLHeap" "newBufferWithLength:options:offset:" (_this, length: usize, options: usize, offset: usize) -> Id { made("MTLBuffer") }
    "MTLDevice" "newBufferWithBytesNoCopy:length:options:deallocator:"
        (_this, at: *mut c_void, length: usize, options: usize, deallocator: *const c_void) -> Id { made("MTLBuffer") }
    "MTLBuffer" "storageMode" (this) -> usize { this.with(|c| c.value as usize) }
    "MTLBuffer" "contents" (this) -> *mut c_void { this.with(|c| c.bytes.as_mut_ptr().cast()) }
    "MTLBuffer" "gpuAddress" (_this) -> u64 { 0x1000 }
    "MTLBuffer" "length" (_this) -> usize { 77 }

    // ---- Order
    "MTLDevice" "newEvent" (_this) -> Id { made("MTLEvent") }
    "MTLDevice" "newSharedEvent" (_this) -> Id { made("MTLSharedEvent") }
    "MTLDevice" "newFence" (_this) -> Id { made("MTLFence") }
    "MTLSharedEvent" "signaledValue" (this) -> u64 { this.with(|c| c.value) }
    "MTLSharedEvent" "setSignaledValue:" (this, value: u64) { this.with(|c| c.value = value); }
    "MTLSharedEvent" "waitUntilSignaledValue:timeoutMS:" (this, value: u64, timeout: u64) -> bool { this.with(|c| c.value) >= value }
    "MTLSharedEvent" "notifyListener:atValue:block:" (this, listener: Id, value: u64, block: *const c_void) {
        // SAFETY: the caller gives a block, which Metal copies.
        let block = unsafe { _Block_copy(block) };
        this.with(|c| c.block = block as usize);
    }
    "MTLResidencySetDescriptor" "setInitialCapacity:" (_this, capacity: usize) {}
    "MTLDevice" "newResidencySetWithDescriptor:error:" (_this, description: Id, error: *mut Id) -> Id {
        // SAFETY: the caller gives a place.
        unsafe { made_or("MTLResidencySet", error) }
    }
    "MTLResidencySet" "addAllocation:" (_this, member: Id) {}
    "MTLResidencySet" "removeAllocation:" (_this, member: Id) {}
    "MTLResidencySet" "commit" (_this) {}
    "MTLResidencySet" "requestResidency" (_this) {}
    "MTLResidencySet" "endResidency" (_this) {}
    "MTLDevice" "counterSets" (_this) -> Id {
        let sets = auto("NSArray");
        sets.with(|c| c.items = vec![Id::new("MTLCounterSet")]);
        sets
    }
    "MTLCounterSet" "name" (_this) -> Id { string("timestamp") }
    "MTLCounterSampleBufferDescriptor" "setCounterSet:" (_this, set: Id) {}
    "MTLCounterSampleBufferDescriptor" "setSampleCount:" (_this, count: usize) {}
    "MTLDevice" "newCounterSampleBufferWithDescriptor:error:" (_this, description: Id, error: *mut Id) -> Id {
        // SAFETY: the caller gives a place.
        unsafe { made_or("MTLCounterSampleBuffer", error) }
    }
    "MTLCounterSampleBuffer" "resolveCounterRange:" (_this, range: NSRange) -> Id {
        let data = auto("NSData");
        data.with(|c| c.bytes = [5_u64, 6].iter().flat_map(|w| w.to_ne_bytes()).collect());
        data
    }

    // ---- Indirect commands and captures
    "MTLIndirectCommandBufferDescriptor" "setCommandTypes:" (_this, types: usize) {}
    "MTLIndirectCommandBufferDescriptor" "setInheritPipelineState:" (_this, inherit: bool) {}
    "MTLIndirectCommandBufferDescriptor" "setInheritBuffers:" (_this, inherit: bool) {}
    "MTLIndirectCommandBufferDescriptor" "setMaxKernelBufferBindCount:" (_this, count: usize) {}
    "MTLDevice" "newIndirectCommandBufferWithDescriptor:maxCommandCount:options:"
        (_this, description: Id, count: usize, options: usize) -> Id { made("MTLIndirectCommandBuffer") }
    "MTLIndirectCommandBuffer" "indirectComputeCommandAtIndex:" (_this, index: usize) -> Id { auto("MTLIndirectComputeCommand") }
    "MTLIndirectCommandBuffer" "resetWithRange:" (_this, range: NSRange) {}
    "MTLIndirectComputeCommand" "reset" (_this) {}
    "MTLIndirectComputeCommand" "setKernelBuffer:offset:atIndex:" (_this, buffer: Id, offset: usize, index: usize) {}
    "MTLIndirectComputeCommand" "setBarrier" (_this) {}
    "MTLIndirectComputeCommand" "concurrentDispatchThreadgroups:threadsPerThreadgroup:" (_this, groups: MTLSize, threads: MTLSize) {}
    "MTLCaptureManager" "sharedCaptureManager" (_this) -> Id { auto("MTLCaptureManager") }
    "MTLCaptureManager" "newCaptureScopeWithCommandQueue:" (_this, queue: Id) -> Id { made("MTLCaptureScope") }
    "MTLCaptureScope" "beginScope" (_this) {}
    "MTLCaptureScope" "endScope" (_this) {}
}

/// The name of the set of timestamp counters.
#[unsafe(no_mangle)]
pub static MTLCommonCounterSetTimestamp: AtomicPtr<crate::runtime::Object> =
    AtomicPtr::new(std::ptr::null_mut());

/// Whether the system lists its device, or has it as the default only.
pub static LISTED: AtomicBool = AtomicBool::new(true);

/// All devices, with a reference that belongs to the caller.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn MTLCopyAllDevices() -> Id {
    let name = Id::new("NSString");
    name.with(|c| c.bytes = b"timestamp\0".to_vec());
    let old = MTLCommonCounterSetTimestamp.swap(name.0, Ordering::Relaxed);
    if !old.is_null() {
        Id(old).release();
    }
    let all = Id::new("NSArray");
    if LISTED.load(Ordering::Relaxed) {
        all.with(|c| c.items = vec![Id::new("MTLDevice")]);
    }
    all
}

/// The default device, with a reference that belongs to the caller.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn MTLCreateSystemDefaultDevice() -> Id {
    made("MTLDevice")
}
