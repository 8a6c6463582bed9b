//! The runtime that CubeCL's facade names, and what its devices say of themselves.

use crate::server::CudaServer;
use cubecl_common::profile::TimingMethod;
use cubecl_core::cmma::MatrixLayout;
use cubecl_core::device::DeviceId;
use cubecl_core::ir::features::{AtomicUsage, Plane};
use cubecl_core::ir::{
    ContiguousElements, DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties,
    MemoryDeviceProperties, MmaProperties, PhysicalDevice, TargetProperties, Type, VectorSize,
};
use cubecl_core::zspace::striding::has_pitched_row_major_strides;
use cubecl_core::zspace::{Shape, Strides};
use cubecl_cpp::cuda::mma::manual::contiguous_elements_cuda;
use cubecl_cpp::register_supported_types;
use cubecl_cpp::shared::{CompilationOptions, CppSupportedFeatures};
use cubecl_server::device::CudaDevice;
use cubecl_server::runtime::Runtime;

/// The alignment of allocations, and of rows in them.
pub(crate) const ALIGNMENT: u64 = 512;

/// Threads of a warp.
const WARP: u32 = 32;

/// CubeCL's CUDA runtime, on Leasehold.
#[derive(Debug, Clone)]
pub struct CudaRuntime;

impl Runtime for CudaRuntime {
    type Server = CudaServer;
    type Device = CudaDevice;

    fn can_read_tensor(shape: &Shape, strides: &Strides) -> bool {
        has_pitched_row_major_strides(shape, strides)
    }

    fn target_properties() -> TargetProperties {
        TargetProperties {
            mma: MmaProperties {
                register_size_bits: 32,
                const_plane_size: WARP,
                register_layout_a: MatrixLayout::RowMajor,
                register_layout_b: MatrixLayout::ColMajor,
                register_layout_acc: MatrixLayout::RowMajor,
                register_duplication_a: 1,
                register_duplication_b: 1,
                register_duplication_acc: 1,
                contiguous_elements: ContiguousElements::new(contiguous_elements_cuda),
            },
        }
    }

    fn enumerate_devices(_: u16) -> Vec<DeviceId> {
        (0..crate::open::count()).map(|index_id| DeviceId { type_id: 0, index_id }).collect()
    }
}

/// The compute capability as CubeCL counts it: 90 for 9.0.
fn capability(runtime: &leasehold::Runtime) -> u32 {
    let arch = runtime.info().arch.iter().find_map(|arch| arch.strip_prefix("cuda/sm_"));
    arch.and_then(|number| number.parse().ok()).unwrap_or(70)
}

/// How CubeCL's compiler writes CUDA C for the device.
pub(crate) fn options() -> CompilationOptions {
    CompilationOptions {
        warp_size: WARP as usize,
        supports_features: CppSupportedFeatures {
            // Sizes and scalars go by value, so that buffers are all pointers that a launch has.
            grid_constants: true,
            ..Default::default()
        },
        ..Default::default()
    }
}

/// What kernels may count on. Of units beside the plain threads nothing is promised yet: no matrix
/// units, no tensor maps, no clusters.
pub(crate) fn properties(runtime: &leasehold::Runtime) -> DeviceProperties {
    let limits = *runtime.raw_device().limits();
    let triple = |of: [u32; 3]| (of[0], of[1], of[2]);
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: WARP,
        plane_size_max: WARP,
        max_bindings: crate::CUDA_MAX_BINDINGS,
        max_shared_memory_size: limits.shared as usize,
        max_cube_count: triple(limits.grid),
        max_units_per_cube: limits.block_threads,
        max_cube_dim: triple(limits.block),
        num_streaming_multiprocessors: Some(runtime.info().units),
        num_tensor_cores: None,
        min_tensor_cores_dim: None,
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let total = runtime.info().memory.total;
    let memory = MemoryDeviceProperties::new(total / 4, ALIGNMENT).with_max_memory(total);
    let identity = DeviceIdentity {
        name: runtime.info().name.clone(),
        fingerprint: format!("leasehold_sm{}", capability(runtime)),
        physical: Some(PhysicalDevice::default()),
    };
    let mut properties =
        DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::System, identity);
    register_supported_types(&mut properties);
    properties.register_atomic_type_usage(
        Type::atomic(ElemType::Float(FloatKind::F64)),
        AtomicUsage::Add | AtomicUsage::LoadStore | AtomicUsage::Exchange,
    );
    let features = &mut properties.features;
    features.memory_reinterpret = true;
    features.alignment = true;
    features.device_memory_scope = true;
    features.plane.insert(Plane::Ops);
    features.plane.insert(Plane::Sync);
    features.plane.insert(Plane::NonUniformControlFlow);
    properties
}
