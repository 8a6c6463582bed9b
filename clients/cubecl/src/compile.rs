//! Kernels: CubeCL's CUDA C, and what a launch gives it.

use crate::storage::DeviceMemory;
use cubecl_core::ir::DeviceProperties;
use cubecl_core::server::ResourceLimitError;
use cubecl_cpp::shared::{CompilationOptions, CppCompiler};
use cubecl_cpp::target::Cuda;
use cubecl_environment::backtrace::BackTrace;
use cubecl_server::id::KernelId;
use cubecl_server::kernel::{BufferIOAttr, CompiledKernel, CubeKernel};
use cubecl_server::logging::ServerLogger;
use cubecl_server::server::LaunchError;
use cubecl_server::timestamp_profiler::TimestampProfiler;
use cubecl_server::validation::{validate_cube_dim, validate_units};
use leasehold::kernel::{Grid, KernelCheck, KernelDesc, KernelSource, Overlap};
use leasehold::{Access, KernelBase, Operand, Stream};
use std::collections::HashMap;
use std::sync::Arc;

/// What a launch gives a kernel: pointers to buffers, then bytes.
#[derive(Debug)]
pub(crate) struct Arguments {
    /// The buffers that the caller bound.
    pub(crate) buffers: Vec<DeviceMemory>,
    /// Sizes and strides that do not fit the bytes, behind the buffers.
    pub(crate) metadata: Option<DeviceMemory>,
    /// The scalars and sizes.
    pub(crate) params: Vec<u8>,
}

/// A kernel's source, and the kernel of each signature that it was launched with.
#[derive(Debug)]
struct Compiled {
    source: String,
    entry: String,
    block: [u32; 3],
    shared: u32,
    io: Option<Arc<[BufferIOAttr]>>,
    /// By the number of pointers and of bytes. A kernel has one in practice.
    kernels: Vec<((usize, usize), KernelBase)>,
}

/// The kernels of a device.
#[derive(Debug)]
pub(crate) struct Kernels {
    options: CompilationOptions,
    properties: DeviceProperties,
    compiled: HashMap<KernelId, Compiled>,
    pub(crate) profiler: TimestampProfiler,
}

impl Kernels {
    pub(crate) fn new(options: CompilationOptions, properties: DeviceProperties) -> Self {
        let (compiled, profiler) = (HashMap::new(), TimestampProfiler::default());
        Self { options, properties, compiled, profiler }
    }

    pub(crate) fn has(&self, id: &KernelId) -> bool {
        self.compiled.contains_key(id)
    }

    /// What the kernel does with each buffer, if CubeCL's compiler said so.
    pub(crate) fn io(&self, id: &KernelId) -> Option<Arc<[BufferIOAttr]>> {
        self.compiled.get(id)?.io.clone()
    }

    /// Makes CUDA C of a kernel.
    pub(crate) fn compile(
        &mut self,
        id: &KernelId,
        kernel: &dyn CubeKernel,
        logger: &ServerLogger,
    ) -> Result<(), LaunchError> {
        validate_cube_dim(&self.properties, id)?;
        validate_units(&self.properties, id)?;
        let definition = cubecl_core::define_kernel(kernel)?;
        let compiler = &mut CppCompiler::<Cuda>::default();
        let made = CompiledKernel::compile(kernel, definition, compiler, &self.options)?;
        logger.log_compilation(&made);
        let requested = made.repr.as_ref().map_or(0, |repr| repr.shared_memory_size);
        let max = self.properties.hardware.max_shared_memory_size;
        if requested > max {
            let backtrace = BackTrace::capture();
            return Err(ResourceLimitError::SharedMemory { requested, max, backtrace }.into());
        }
        let compiled = Compiled {
            source: made.source,
            entry: made.entrypoint_name,
            block: [made.cube_dim.x, made.cube_dim.y, made.cube_dim.z],
            shared: requested as u32,
            io: made.io.map(Arc::from),
            kernels: Vec::new(),
        };
        self.compiled.insert(id.clone(), compiled);
        Ok(())
    }

    /// Launches a kernel that was compiled.
    pub(crate) fn launch(
        &mut self,
        id: &KernelId,
        stream: &Stream,
        blocks: [u32; 3],
        arguments: &Arguments,
    ) -> leasehold::Result<()> {
        let Some(compiled) = self.compiled.get_mut(id) else {
            return Err(leasehold::Error::invalid(format!("kernel {id} was not compiled")));
        };
        let pointers = arguments.buffers.len() + usize::from(arguments.metadata.is_some());
        let signature = (pointers, arguments.params.len());
        let known = compiled.kernels.iter().position(|(of, _)| *of == signature);
        let at = match known {
            Some(at) => at,
            None => {
                let kernel = compiled.kernel(arguments)?;
                compiled.kernels.push((signature, kernel));
                compiled.kernels.len() - 1
            }
        };
        let mut operands: Vec<Operand<'_>> = Vec::with_capacity(pointers);
        for (i, buffer) in arguments.buffers.iter().enumerate() {
            operands.push(buffer.view().with(compiled.access(i)));
        }
        operands.extend(arguments.metadata.iter().map(|metadata| metadata.view().read()));
        let grid = Grid::new(blocks).threads(compiled.block).shared(compiled.shared);
        stream.launch(&compiled.kernels[at].1, &operands, &*arguments.params, grid)
    }
}

impl Compiled {
    /// The access to a buffer. A kernel that only writes may leave bytes as they were, which the
    /// runtime's write does not promise to keep.
    fn access(&self, buffer: usize) -> Access {
        match self.io.as_ref().and_then(|io| io.get(buffer)) {
            Some(BufferIOAttr::ReadOnly | BufferIOAttr::Dead) => Access::Read,
            Some(BufferIOAttr::WriteOnly | BufferIOAttr::ReadWrite) | None => Access::ReadWrite,
        }
    }

    /// The kernel with the signature of these arguments.
    fn kernel(&self, arguments: &Arguments) -> leasehold::Result<KernelBase> {
        let mut access: Vec<Access> =
            (0..arguments.buffers.len()).map(|i| self.access(i)).collect();
        access.extend(arguments.metadata.iter().map(|_| Access::Read));
        let source = self.source.clone().into();
        let options = crate::open::headers().map(|folder| format!("--include-path={folder}"));
        let options = options.into_iter().collect::<Vec<_>>().into();
        let source = KernelSource::CudaC { source, options };
        let desc = KernelDesc::new(self.entry.clone(), source, &access, KernelCheck::any());
        let mut desc = desc.overlapping(Overlap::Any);
        desc.params = arguments.params.len() as u32;
        // SAFETY: launches of CubeCL are unsafe to their caller, who vouches that the kernel stays
        // within its buffers. The accesses are what CubeCL's compiler found in the kernel, and else
        // the widest. Blocks that write what other blocks use are the caller's affair there too.
        unsafe { KernelBase::new(desc) }
    }
}
