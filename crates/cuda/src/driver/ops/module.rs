//! Calls for modules and functions.

use super::{Launch, NativeFunction, NativeModule};
use leasehold_core::Result;
use leasehold_hal::TensorMap;

/// The resources and parameters of a function.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FunctionInfo {
    /// The most threads of a block.
    pub block_threads: u32,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of shared memory that the code itself declares.
    pub shared: u32,
    /// Bytes of local memory per thread.
    pub local: u32,
    /// Offset and size of each parameter, in bytes. `None` if the driver does not report them
    /// (before 12.4).
    pub params: Option<Vec<(u32, u32)>>,
    /// The compute capability of the chosen code, times ten.
    pub binary: u32,
    /// The compute capability that the source was compiled for, times ten: that of the PTX, if the
    /// driver translated it.
    pub source: u32,
}

/// Calls for modules and functions.
pub trait ModuleOps {
    /// Loads PTX text: `cuModuleLoadDataEx`. Blocks while the driver compiles.
    ///
    /// # Errors
    /// - `Compile` with the driver's log.
    /// - `Compile` for machine code, because a driver reads as many bytes as the code itself
    ///   claims.
    fn module_load(&self, image: &[u8]) -> Result<NativeModule>;

    /// Loads machine code: `cuModuleLoadDataEx`. May block.
    ///
    /// # Errors
    /// `Compile` if the driver refuses the code: it is for other devices, or for newer drivers.
    ///
    /// # Safety
    /// - `image` is a whole cubin, as NVIDIA's compiler wrote it.
    unsafe fn module_load_cubin(&self, image: &[u8]) -> Result<NativeModule>;

    /// Unloads a module: `cuModuleUnload`. May wait for the device.
    ///
    /// # Safety
    /// - `module` came from [`module_load`](Self::module_load) or
    ///   [`module_load_cubin`](Self::module_load_cubin) and is unloaded once. No work runs its
    ///   functions, and no later work launches them.
    unsafe fn module_unload(&self, module: NativeModule) -> Result<()>;

    /// Finds and loads a function of a module, for any `CUDA_MODULE_LOADING`:
    /// `cuModuleGetFunction`, `cuFuncLoad`. May block. Only the simulated driver uses `limits`, the
    /// kernel's [`limits`](leasehold_hal::KernelDesc::limits), to find memory.
    ///
    /// # Errors
    /// `NotFound`, with the function's name.
    ///
    /// # Safety
    /// - `module` is a module of this driver that was not unloaded.
    unsafe fn module_function(
        &self,
        module: NativeModule,
        name: &str,
        limits: &[(u32, u32)],
    ) -> Result<NativeFunction>;

    /// The resources and parameters of a function: `cuFuncGetAttribute` (seven),
    /// `cuFuncGetParamInfo`. Does not block.
    ///
    /// # Safety
    /// - `function` is a function of a module that was not unloaded.
    unsafe fn function_info(&self, function: NativeFunction) -> Result<FunctionInfo>;

    /// Lets a function's launches request this many bytes of dynamic shared memory:
    /// `cuFuncSetAttribute`. Does not block.
    ///
    /// # Safety
    /// - `function` is a function of a module that was not unloaded.
    unsafe fn function_allow_shared(&self, function: NativeFunction, bytes: u32) -> Result<()>;

    /// Lets a function's launches have clusters of more than 8 blocks: `cuFuncSetAttribute`. Does
    /// not block.
    ///
    /// # Safety
    /// - `function` is a function of a module that was not unloaded.
    unsafe fn function_allow_clusters(&self, function: NativeFunction) -> Result<()>;

    /// The blocks of a launch that one multiprocessor runs at the same time
    /// (`cuOccupancyMaxActiveBlocksPerMultiprocessor`), or the clusters that the device does
    /// (`cuOccupancyMaxActiveClusters`) if the launch has attributes. Its grid and arguments mean
    /// nothing. Does not block.
    ///
    /// # Safety
    /// - The function is of a module that was not unloaded.
    unsafe fn occupancy(&self, launch: &Launch<'_>) -> Result<u32>;

    /// Makes the driver's form of a tensor map of the memory at an address:
    /// `cuTensorMapEncodeTiled`. Touches no memory of the device, and does not block.
    ///
    /// # Errors
    /// - `Unsupported` for a driver without tensor maps (before 12.0).
    /// - `Driver` for a map that the driver refuses.
    fn tensor_map(&self, addr: u64, map: &TensorMap) -> Result<NativeTensorMap>;
}

/// A `CUtensorMap`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct NativeTensorMap(pub [u8; TensorMap::BYTES as usize]);
