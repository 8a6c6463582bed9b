//! A driver without effects. `real.rs` compiles it to a `libcuda.so.1` of its own. It shows how the
//! real driver's bindings load it, pass arguments and take answers. Arguments and the environment
//! choose its answers. With `--cfg without_symbols` it lacks a required function, with `--cfg
//! without_optional` the newer functions.
//!
//! The file is a program without dependencies, not a module of the tests.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

type HostFn = unsafe extern "C" fn(*mut c_void);

/// The state of the process, which has one thread.
struct State {
    current: u64,
    lost: u64,
    arguments: Vec<u8>,
    owned: Option<(HostFn, usize)>,
    node: Option<(HostFn, usize)>,
}

static mut STATE: State = State { current: 0, lost: 0, arguments: Vec::new(), owned: None, node: None };

fn state() -> &'static mut State {
    // SAFETY: the process has one thread, and no function keeps the reference.
    unsafe { &mut *(&raw mut STATE) }
}

fn number(name: &str) -> Option<c_int> {
    std::env::var(name).ok()?.parse().ok()
}

/// Functions that succeed and do nothing.
macro_rules! nothing {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> c_int {
            if state().lost != 0 && state().lost == state().current { 719 } else { 0 }
        }
    )*};
}

/// Functions that make an object: they write a handle to the first argument.
macro_rules! makes {
    ($($name:ident)*) => {$(
        /// # Safety
        /// - `out` is a word that can be written.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(out: *mut u64) -> c_int {
            if state().lost != 0 && state().lost == state().current {
                return 719;
            }
            // SAFETY: `out` can be written (the contract of this function).
            unsafe { *out = number("STUB_MADE").map_or(0x10000, |made| made as u64) };
            0
        }
    )*};
}

nothing! {
    cuMemFree_v2 cuMemFreeAsync cuMemPoolSetAttribute cuMemPoolTrimTo cuMemAddressFree cuMemRelease cuMemMap cuMemUnmap cuMemSetAccess
    cuMemFreeHost cuMemHostRegister_v2 cuMemHostUnregister cuStreamDestroy_v2 cuStreamWaitEvent cuStreamWriteValue64_v2
    cuStreamWaitValue64_v2 cuMemcpyHtoDAsync_v2 cuMemcpyDtoDAsync_v2 cuMemcpy2DAsync_v2 cuMemcpyPeerAsync cuMemsetD8Async cuMemsetD16Async
    cuMemsetD32Async cuEventDestroy_v2 cuEventRecord cuEventSynchronize cuModuleUnload cuFuncSetAttribute cuGraphDestroy
    cuLaunchKernelEx cuOccupancyMaxActiveBlocksPerMultiprocessor cuGraphKernelNodeSetAttribute
    cuGraphUpload cuGraphExecMemsetNodeSetParams cuStreamBeginCapture_v2 cuCtxDestroy_v2
    cuCtxDisablePeerAccess cuCtxSynchronize cuCtxGetStreamPriorityRange cuMemGetInfo_v2
    cuStreamIsCapturing cuThreadExchangeStreamCaptureMode cuGraphGetNodes cuUserObjectRelease cuGraphRetainUserObject cuDeviceCanAccessPeer
    cuDeviceGetUuid_v2 cuDeviceGetName cuDeviceGetPCIBusId cuCtxPopCurrent_v2 cuMemExportToShareableHandle
}

makes! {
    cuMemAllocAsync cuDeviceGetDefaultMemPool cuMemGetAllocationGranularity cuMemAddressReserve cuMemCreate cuMemHostAlloc
    cuStreamCreateWithPriority cuEventCreate cuModuleGetFunction cuGraphCreate cuGraphAddKernelNode_v2
    cuGraphAddMemsetNode cuGraphAddChildGraphNode cuGraphAddEventRecordNode cuGraphAddEmptyNode cuGraphInstantiateWithFlags
    cuStreamEndCapture cuDeviceTotalMem_v2 cuMemImportFromShareableHandle
}

#[cfg(not(without_optional))]
nothing! { cuFuncLoad }
#[cfg(not(without_optional))]
makes! { cuCtxCreate_v4 }
#[cfg(without_optional)]
makes! { cuCtxCreate_v2 }

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> c_int {
    0
}

/// # Safety
/// - As for all functions here: pointers are as the driver's header describes them.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxGetState(_device: c_int, flags: *mut c_uint, active: *mut c_int) -> c_int {
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    unsafe { (*flags, *active) = (0, 0) };
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> c_int {
    number("STUB_INIT").unwrap_or(0)
}

/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    unsafe { *version = number("STUB_VERSION").unwrap_or(13000) };
    0
}

/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(code: c_int, name: *mut *const c_char) -> c_int {
    if code != 1234 {
        return 1;
    }
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    unsafe { *name = c"CUDA_ERROR_FROM_TOMORROW".as_ptr() };
    0
}

/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    unsafe { *count = number("STUB_COUNT").unwrap_or(2) };
    0
}

/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    unsafe { *device = ordinal };
    if ordinal < 2 { 0 } else { 101 }
}

/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) -> c_int {
    // The stub acts as a driver that does not know the newest attribute (the host's NUMA node).
    if attribute == 134 {
        return 1;
    }
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    unsafe { *value = number("STUB_ATTRIBUTE").unwrap_or(attribute) };
    0
}

/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut u64, device: c_int) -> c_int {
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    unsafe { *context = number("STUB_MADE").map_or(0x100 + device as u64, |made| made as u64) };
    0
}

/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut u64) -> c_int {
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    unsafe { *context = state().current };
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: u64) -> c_int {
    state().current = context;
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxEnablePeerAccess(_context: u64, _flags: c_uint) -> c_int {
    704
}

type Hear = unsafe extern "C" fn(*mut c_void, c_int, *const c_char, usize);

static mut HEAR: Option<Hear> = None;

/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[cfg(not(without_optional))]
#[unsafe(no_mangle)]
unsafe extern "C" fn cuLogsRegisterCallback(hear: Hear, _data: *mut c_void, handle: *mut u64) -> c_int {
    // SAFETY: the pointers are as the header describes them (the contract of this function), and
    // the process has one thread.
    unsafe { (HEAR, *handle) = (Some(hear), 1) };
    0
}

#[cfg(not(without_symbols))]
fn say(words: &CStr) {
    // SAFETY: the process has one thread, and the text has its length.
    unsafe {
        if let Some(hear) = HEAR {
            hear(std::ptr::null_mut(), 0, words.as_ptr(), words.to_bytes().len());
        }
    }
}

/// The size selects the code. The function is absent with `without_symbols`.
///
/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[cfg(not(without_symbols))]
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(addr: *mut u64, bytes: usize) -> c_int {
    if state().lost != 0 && state().lost == state().current {
        return 719;
    }
    match bytes {
        0 => {
            say(c"Requested 0 byte allocation");
            say(c"Returning 1 (CUDA_ERROR_INVALID_VALUE) from cuMemAlloc_v2");
            1
        }
        77 => 1234,
        78 => 4321,
        79 => 700,
        bytes if bytes > 1 << 40 => 2,
        _ => {
            // SAFETY: the pointers are as the header describes them (the contract of this
            // function).
            unsafe { *addr = number("STUB_MADE").map_or(0x20000, |made| made as u64) };
            0
        }
    }
}

/// The current context faults.
#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: u64) -> c_int {
    if stream == 0xdead {
        state().lost = state().current;
    }
    if state().lost != 0 && state().lost == state().current { 700 } else { 0 }
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(_stream: u64) -> c_int {
    600
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(_event: u64) -> c_int {
    600
}

#[cfg(not(without_optional))]
#[unsafe(no_mangle)]
extern "C" fn cuEventElapsedTime_v2(_milliseconds: *mut f32, _start: u64, _end: u64) -> c_int {
    600
}

#[cfg(without_optional)]
#[unsafe(no_mangle)]
extern "C" fn cuEventElapsedTime(_milliseconds: *mut f32, _start: u64, _end: u64) -> c_int {
    400
}

/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchHostFunc(stream: u64, call: HostFn, data: *mut c_void) -> c_int {
    if stream == 0 {
        return 400;
    }
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    unsafe { call(data) };
    0
}

/// Keeps the argument buffer, if the list is as the header describes it.
///
/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    _function: u64,
    grid_x: c_uint,
    _grid_y: c_uint,
    _grid_z: c_uint,
    _block_x: c_uint,
    _block_y: c_uint,
    _block_z: c_uint,
    _shared: c_uint,
    _stream: u64,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> c_int {
    if grid_x == 0 || !params.is_null() {
        return 1;
    }
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    unsafe { keep(extra) }
}

/// # Safety
/// - `extra` is null, or a list as the header describes it.
unsafe fn keep(extra: *mut *mut c_void) -> c_int {
    state().arguments.clear();
    if extra.is_null() {
        return 0;
    }
    // SAFETY: the list is pointer, buffer, size, pointer to the size, end (the contract of this
    // function).
    unsafe {
        if [*extra as usize, *extra.add(2) as usize, *extra.add(4) as usize] != [1, 2, 0] {
            return 1;
        }
        let bytes = *(*extra.add(3)).cast::<usize>();
        state().arguments.extend_from_slice(std::slice::from_raw_parts((*extra.add(1)).cast::<u8>(), bytes));
    }
    0
}

/// Takes a buffer of arguments, or the list of a function's two parameters (`cuFuncGetParamInfo`).
///
/// # Safety
/// - `params` points to a `CUDA_KERNEL_NODE_PARAMS`.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphExecKernelNodeSetParams_v2(_exec: u64, node: u64, params: *const u64) -> c_int {
    if node == 0xbad {
        return 910;
    }
    // The structure: function (1 word), seven sizes (4 words with their padding), `kernelParams`,
    // `extra`.
    // SAFETY: `params` points to such a structure (the contract of this function).
    let (listed, extra) = unsafe { (*params.add(5) as *const *const u8, *params.add(6)) };
    if listed.is_null() {
        // SAFETY: as above.
        return unsafe { keep(extra as *mut *mut c_void) };
    }
    // SAFETY: the list has a place for each parameter (the contract of this function).
    let [first, second] = unsafe { [std::slice::from_raw_parts(*listed, 8), std::slice::from_raw_parts(*listed.add(1), 4)] };
    state().arguments = [first, second].concat();
    c_int::from(extra != 0)
}

/// Refuses a pitch smaller than a row, even for a single row, as the driver does.
///
/// # Safety
/// - `params` points to a `CUDA_MEMCPY3D`.
unsafe fn copy_is_good(params: *const u64) -> c_int {
    // SAFETY: `at` is one of the structure's 25 words, to which `params` points (the contract of
    // this function).
    let word = |at: usize| unsafe { *params.add(at) };
    let [src_pitch, src_height, dst_pitch, dst_height, width, height, depth] = [9, 10, 20, 21, 22, 23, 24].map(word);
    let fits = src_pitch >= width && dst_pitch >= width && src_height >= height && dst_height >= height;
    if fits && width > 0 && height > 0 && depth == 1 { 0 } else { 1 }
}

/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphAddMemcpyNode(
    node: *mut u64,
    _graph: u64,
    _after: *const u64,
    _count: usize,
    params: *const u64,
    _context: u64,
) -> c_int {
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    unsafe {
        *node = 0x60000;
        copy_is_good(params)
    }
}

/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphExecMemcpyNodeSetParams(
    _exec: u64,
    _node: u64,
    params: *const u64,
    _context: u64,
) -> c_int {
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    unsafe { copy_is_good(params) }
}

/// Copies from the device's memory, which is the argument buffer of the last launch.
///
/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(dst: *mut u8, _src: u64, bytes: usize, _stream: u64) -> c_int {
    let from = &state().arguments;
    if from.len() != bytes {
        return 1;
    }
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), dst, bytes) };
    0
}

/// Accepts text that begins as PTX. For other text it writes a log.
///
/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadDataEx(
    module: *mut u64,
    image: *const c_char,
    count: c_uint,
    options: *const c_int,
    values: *const *mut c_void,
) -> c_int {
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    unsafe {
        if CStr::from_ptr(image).to_bytes().starts_with(b".version") {
            *module = 0x30000;
            return 0;
        }
        let (log, size) = (*values, *values.add(1) as usize);
        if count != 2 || [*options, *options.add(1)] != [5, 6] || size < 64 {
            return 999;
        }
        std::ptr::copy_nonoverlapping(c"line 1: what is this?".as_ptr(), log.cast(), 22);
    }
    218
}

/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[unsafe(no_mangle)]
unsafe extern "C" fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, _function: u64) -> c_int {
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    unsafe { *value = 100 + attribute };
    0
}

/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[cfg(not(without_optional))]
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphConditionalHandleCreate(made: *mut u64, graph: u64, _context: u64, value: c_uint, flags: c_uint) -> c_int {
    if (value, flags) != (0, 0) {
        return 1;
    }
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    unsafe { *made = graph << 8 };
    0
}

/// Takes one condition: that of graph 7. The body's handle tells the kind.
///
/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[cfg(not(without_optional))]
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphAddNode_v2(made: *mut u64, graph: u64, _after: *const u64, edges: *const c_void, count: usize, params: *mut u8) -> c_int {
    static mut BODY: u64 = 0;
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    let (kind, handle, of, size) = unsafe {
        (*params.cast::<u32>(), *params.add(16).cast::<u64>(), *params.add(24).cast::<u32>(), *params.add(28).cast::<u32>())
    };
    if (kind, graph, handle, count, size) != (13, 7, 0x700, 2, 1) || !edges.is_null() {
        return 1;
    }
    // SAFETY: as above; the process has one thread.
    unsafe {
        BODY = 0x5000 + u64::from(of);
        *params.add(32).cast::<*mut u64>() = &raw mut BODY;
        *made = 0x20000;
    }
    0
}

/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[cfg(not(without_optional))]
#[unsafe(no_mangle)]
unsafe extern "C" fn cuFuncGetParamInfo(_function: u64, index: usize, offset: *mut usize, size: *mut usize) -> c_int {
    if index > 1 {
        return 1;
    }
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    unsafe { (*offset, *size) = (index * 8, 8 - index * 4) };
    0
}

/// # Safety
/// - As [`cuDevicePrimaryCtxGetState`].
#[unsafe(no_mangle)]
unsafe extern "C" fn cuUserObjectCreate(
    object: *mut u64,
    data: *mut c_void,
    destroy: HostFn,
    count: c_uint,
    flags: c_uint,
) -> c_int {
    if count != 1 || flags != 1 {
        return 1;
    }
    state().owned = Some((destroy, data as usize));
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    unsafe { *object = 0x40000 };
    0
}

/// # Safety
/// - `params` points to a `CUDA_HOST_NODE_PARAMS`.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphAddHostNode(
    node: *mut u64,
    _graph: u64,
    _after: *const u64,
    _count: usize,
    params: *const (HostFn, *mut c_void),
) -> c_int {
    // SAFETY: the pointers are as the header describes them (the contract of this function).
    unsafe {
        state().node = Some(((*params).0, (*params).1 as usize));
        *node = 0x50000;
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphLaunch(_exec: u64, _stream: u64) -> c_int {
    if let Some((call, data)) = state().node {
        // SAFETY: the node's data lives until its user object is dropped.
        unsafe { call(data as *mut c_void) };
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphExecDestroy(_exec: u64) -> c_int {
    if let Some((destroy, data)) = state().owned.take() {
        // SAFETY: the destructor is called once.
        unsafe { destroy(data as *mut c_void) };
    }
    0
}
