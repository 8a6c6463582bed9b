//! The driver's functions, looked up once. cudarc's bindings supply the library's search path, the
//! types and (checked at compile time) the signatures. The calls go through this table and not
//! through cudarc's wrappers. Those panic on a missing symbol and return a Rust enum, which must
//! not hold a code newer than the bindings.
//!
//! This module must not know managers.

use super::plausible::text;
use crate::driver::loader::refusal;
use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUgraphNode,
    CUhostFn, CUmemGenericAllocationHandle, CUmemoryPool, CUmodule, CUstream, CUuserObject,
};
use leasehold_core::{Error, Result};
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ushort, c_void};

/// The oldest driver with all required functions, as a version of `cuDriverGetVersion`.
pub const OLDEST: i32 = 12000;

/// Declares the table of functions.
macro_rules! functions {
    (
        required { $($name:ident($($arg:ty),*);)* }
        optional { $($opt:ident($($oarg:ty),*);)* }
        unchecked { $($old:ident($($old_arg:ty),*);)* }
    ) => {
        /// The driver's functions.
        #[expect(non_snake_case, reason = "the driver's own names")]
        #[derive(Debug, Clone, Copy)]
        pub struct Functions {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> c_int,)*
            $(pub $opt: Option<unsafe extern "C" fn($($oarg),*) -> c_int>,)*
            $(pub $old: Option<unsafe extern "C" fn($($old_arg),*) -> c_int>,)*
        }

        $(const _: unsafe fn($($arg),*) -> sys::CUresult = sys::$name;)*
        $(const _: unsafe fn($($oarg),*) -> sys::CUresult = sys::$opt;)*

        impl Functions {
            /// Finds the library and all functions.
            ///
            /// # Errors
            /// `Unavailable`, with the missing library or function.
            pub fn load() -> Result<Self> {
                // SAFETY: loading the driver's library runs its initialisers, which the caller asks
                // for.
                if !unsafe { sys::is_culib_present() } {
                    return Err(absent());
                }
                // SAFETY: the library is present, so cudarc finds it again. The library stays
                // loaded for ever.
                let library = unsafe { sys::culib() };
                let missing = |name: &str| {
                    Error::Unavailable(format!("CUDA: the driver has no function {name}; it is older than {}.{}", OLDEST / 1000, OLDEST % 1000 / 10).into())
                };
                Ok(Self {
                    $(
                        // SAFETY: the driver's symbol of this name has this signature. The types
                        // are checked against cudarc's bindings, and a result code is an `int` in
                        // the C interface.
                        $name: *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                            .map_err(|_| missing(stringify!($name)))?,
                    )*
                    $(
                        // SAFETY: if the driver has a symbol of this name, the symbol has this
                        // signature.
                        $opt: unsafe { library.get(concat!(stringify!($opt), "\0").as_bytes()) }.ok().map(|f| *f),
                    )*
                    $(
                        // SAFETY: the driver's symbol of this name has the signature of the header.
                        // The bindings for 13.0 lack the older functions. They give
                        // `cuGetErrorName`, the callback and tensor maps enums that cannot hold
                        // every number.
                        $old: unsafe { library.get(concat!(stringify!($old), "\0").as_bytes()) }.ok().map(|f| *f),
                    )*
                })
            }
        }
    };
}

functions! {
    required {
        cuInit(c_uint);
        cuDriverGetVersion(*mut c_int);
        cuDeviceGet(*mut CUdevice, c_int);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGetName(*mut c_char, c_int, CUdevice);
        cuDeviceGetUuid_v2(*mut sys::CUuuid, CUdevice);
        cuDeviceTotalMem_v2(*mut usize, CUdevice);
        cuDeviceGetAttribute(*mut c_int, sys::CUdevice_attribute, CUdevice);
        cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice);
        cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
        cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        cuDevicePrimaryCtxRelease_v2(CUdevice);
        cuDevicePrimaryCtxGetState(CUdevice, *mut c_uint, *mut c_int);
        cuCtxPopCurrent_v2(*mut CUcontext);
        cuCtxDestroy_v2(CUcontext);
        cuCtxGetCurrent(*mut CUcontext);
        cuCtxSetCurrent(CUcontext);
        cuCtxEnablePeerAccess(CUcontext, c_uint);
        cuCtxDisablePeerAccess(CUcontext);
        cuCtxSynchronize();
        cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuMemAlloc_v2(*mut CUdeviceptr, usize);
        cuMemFree_v2(CUdeviceptr);
        cuMemAllocAsync(*mut CUdeviceptr, usize, CUstream);
        cuMemFreeAsync(CUdeviceptr, CUstream);
        cuDeviceGetDefaultMemPool(*mut CUmemoryPool, CUdevice);
        cuMemPoolSetAttribute(CUmemoryPool, sys::CUmemPool_attribute, *mut c_void);
        cuMemPoolTrimTo(CUmemoryPool, usize);
        cuMemGetAllocationGranularity(*mut usize, *const sys::CUmemAllocationProp, sys::CUmemAllocationGranularity_flags);
        cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, u64);
        cuMemAddressFree(CUdeviceptr, usize);
        cuMemExportToShareableHandle(*mut c_void, CUmemGenericAllocationHandle, sys::CUmemAllocationHandleType, u64);
        cuMemImportFromShareableHandle(*mut CUmemGenericAllocationHandle, *mut c_void, sys::CUmemAllocationHandleType);
        cuMemCreate(*mut CUmemGenericAllocationHandle, usize, *const sys::CUmemAllocationProp, u64);
        cuMemRelease(CUmemGenericAllocationHandle);
        cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, u64);
        cuMemUnmap(CUdeviceptr, usize);
        cuMemSetAccess(CUdeviceptr, usize, *const sys::CUmemAccessDesc, usize);
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        cuMemFreeHost(*mut c_void);
        cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        cuMemHostUnregister(*mut c_void);
        cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
        cuStreamDestroy_v2(CUstream);
        cuStreamQuery(CUstream);
        cuStreamSynchronize(CUstream);
        cuStreamWaitEvent(CUstream, CUevent, c_uint);
        cuStreamWriteValue64_v2(CUstream, CUdeviceptr, u64, c_uint);
        cuStreamWaitValue64_v2(CUstream, CUdeviceptr, u64, c_uint);
        cuLaunchHostFunc(CUstream, CUhostFn, *mut c_void);
        cuLaunchKernelEx(*const sys::CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);
        cuLaunchKernel(CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void);
        cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
        cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
        cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
        cuMemcpy2DAsync_v2(*const sys::CUDA_MEMCPY2D, CUstream);
        cuMemcpyPeerAsync(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, usize, CUstream);
        cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
        cuMemsetD16Async(CUdeviceptr, c_ushort, usize, CUstream);
        cuMemsetD32Async(CUdeviceptr, c_uint, usize, CUstream);
        cuEventCreate(*mut CUevent, c_uint);
        cuEventDestroy_v2(CUevent);
        cuEventRecord(CUevent, CUstream);
        cuEventQuery(CUevent);
        cuEventSynchronize(CUevent);
        cuModuleLoadDataEx(*mut CUmodule, *const c_void, c_uint, *mut sys::CUjit_option, *mut *mut c_void);
        cuModuleUnload(CUmodule);
        cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
        cuFuncGetAttribute(*mut c_int, sys::CUfunction_attribute, CUfunction);
        cuFuncSetAttribute(CUfunction, sys::CUfunction_attribute, c_int);
        cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, CUfunction, c_int, usize);
        cuGraphCreate(*mut CUgraph, c_uint);
        cuGraphDestroy(CUgraph);
        cuGraphAddKernelNode_v2(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *const sys::CUDA_KERNEL_NODE_PARAMS);
        cuGraphKernelNodeSetAttribute(CUgraphNode, sys::CUkernelNodeAttrID, *const sys::CUkernelNodeAttrValue);
        cuGraphAddMemcpyNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *const sys::CUDA_MEMCPY3D, CUcontext);
        cuGraphAddMemsetNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *const sys::CUDA_MEMSET_NODE_PARAMS, CUcontext);
        cuGraphAddChildGraphNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize, CUgraph);
        cuGraphAddEventRecordNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize, CUevent);
        cuGraphAddHostNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *const sys::CUDA_HOST_NODE_PARAMS);
        cuGraphAddEmptyNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize);
        cuGraphGetNodes(CUgraph, *mut CUgraphNode, *mut usize);
        cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, u64);
        cuGraphExecDestroy(CUgraphExec);
        cuGraphUpload(CUgraphExec, CUstream);
        cuGraphLaunch(CUgraphExec, CUstream);
        cuGraphExecKernelNodeSetParams_v2(CUgraphExec, CUgraphNode, *const sys::CUDA_KERNEL_NODE_PARAMS);
        cuGraphExecMemcpyNodeSetParams(CUgraphExec, CUgraphNode, *const sys::CUDA_MEMCPY3D, CUcontext);
        cuGraphExecMemsetNodeSetParams(CUgraphExec, CUgraphNode, *const sys::CUDA_MEMSET_NODE_PARAMS, CUcontext);
        cuStreamBeginCapture_v2(CUstream, sys::CUstreamCaptureMode);
        cuStreamEndCapture(CUstream, *mut CUgraph);
        cuStreamIsCapturing(CUstream, *mut sys::CUstreamCaptureStatus);
        cuThreadExchangeStreamCaptureMode(*mut sys::CUstreamCaptureMode);
        cuUserObjectCreate(*mut CUuserObject, *mut c_void, CUhostFn, c_uint, c_uint);
        cuGraphRetainUserObject(CUgraph, CUuserObject, c_uint, c_uint);
        cuUserObjectRelease(CUuserObject, c_uint);
    }
    optional {
        cuCtxCreate_v4(*mut CUcontext, *mut sys::CUctxCreateParams, c_uint, CUdevice);
        cuEventElapsedTime_v2(*mut f32, CUevent, CUevent);
        cuDeviceGetDevResource(CUdevice, *mut sys::CUdevResource, sys::CUdevResourceType);
        cuDevSmResourceSplitByCount(*mut sys::CUdevResource, *mut c_uint, *const sys::CUdevResource, *mut sys::CUdevResource, c_uint, c_uint);
        cuDevResourceGenerateDesc(*mut sys::CUdevResourceDesc, *mut sys::CUdevResource, c_uint);
        cuGreenCtxCreate(*mut sys::CUgreenCtx, sys::CUdevResourceDesc, CUdevice, c_uint);
        cuGreenCtxDestroy(sys::CUgreenCtx);
        cuGreenCtxGetDevResource(sys::CUgreenCtx, *mut sys::CUdevResource, sys::CUdevResourceType);
        cuGreenCtxStreamCreate(*mut CUstream, sys::CUgreenCtx, c_uint, c_int);
        cuCtxFromGreenCtx(*mut CUcontext, sys::CUgreenCtx);
        cuFuncLoad(CUfunction);
        cuGraphAddDependencies_v2(CUgraph, *const CUgraphNode, *const CUgraphNode, *const sys::CUgraphEdgeData, usize);
        cuGraphConditionalHandleCreate(*mut u64, CUgraph, CUcontext, c_uint, c_uint);
        cuGraphAddNode_v2(*mut CUgraphNode, CUgraph, *const CUgraphNode, *const sys::CUgraphEdgeData, usize, *mut sys::CUgraphNodeParams);
        cuFuncGetParamInfo(CUfunction, usize, *mut usize, *mut usize);
        cuMemcpyBatchAsync_v2(*mut CUdeviceptr, *mut CUdeviceptr, *mut usize, usize, *mut sys::CUmemcpyAttributes, *mut usize, usize, CUstream);
    }
    unchecked {
        cuGetErrorName(c_int, *mut *const c_char);
        cuLogsRegisterCallback(unsafe extern "C" fn(*mut c_void, c_int, *const c_char, usize), *mut c_void, *mut *mut c_void);
        cuCtxCreate_v2(*mut CUcontext, c_uint, CUdevice);
        cuEventElapsedTime(*mut f32, CUevent, CUevent);
        cuMemcpyBatchAsync(*mut CUdeviceptr, *mut CUdeviceptr, *mut usize, usize, *mut sys::CUmemcpyAttributes, *mut usize, usize, *mut usize, CUstream);
        cuOccupancyMaxActiveClusters(*mut c_int, CUfunction, *const sys::CUlaunchConfig);
        cuTensorMapEncodeTiled(*mut sys::CUtensorMap, c_int, c_uint, *mut c_void, *const u64, *const u64, *const c_uint, *const c_uint, c_int, c_int, c_int, c_int);
    }
}

/// The error for a driver library that was not found.
#[cold]
fn absent() -> Error {
    let names = ["cuda", "nvcuda"].into_iter().flat_map(cudarc::get_lib_name_candidates);
    Error::Unavailable(match refusal(names) {
        Some(why) => {
            format!("CUDA: the driver's library is there and cannot be loaded: {why}").into()
        }
        None => {
            "CUDA: the driver's library (libcuda.so.1, nvcuda.dll) is not installed on this machine"
                .into()
        }
    })
}

impl Functions {
    /// Whether one call copies several ranges: the form of 13.0, or that of 12.8, which names the
    /// copy that failed.
    pub fn has_copy_batch(&self) -> bool {
        self.cuMemcpyBatchAsync_v2.is_some() || self.cuMemcpyBatchAsync.is_some()
    }

    /// Whether all calls for partitions are there (12.5). The driver then has the feature on every
    /// architecture that it supports (Pascal and newer).
    pub fn has_partitions(&self) -> bool {
        self.cuDevSmResourceSplitByCount.is_some()
            && self.cuGreenCtxStreamCreate.is_some()
            && self.cuCtxFromGreenCtx.is_some()
    }

    /// Whether graphs have conditional nodes.
    pub fn has_conditional_nodes(&self) -> bool {
        self.cuGraphConditionalHandleCreate.is_some() && self.cuGraphAddNode_v2.is_some()
    }

    /// The driver's name for a code, including codes newer than this crate.
    pub fn error_name(&self, code: i32) -> Option<Box<str>> {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: the pointer is to a local.
        let told = unsafe { (self.cuGetErrorName?)(code, &raw mut name) };
        if told != 0 || name.is_null() {
            return None;
        }
        // SAFETY: the driver's text lives for ever.
        let name = text(unsafe { CStr::from_ptr(name) }.to_bytes());
        (!name.is_empty()).then(|| name.into())
    }
}
