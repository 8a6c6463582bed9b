//! The library: the kernels of one runtime, resolved for its device, in the runtime's extension
//! slot.
//!
//! This module must not know what the kernels compute.

use crate::kernels::cpu::KERNELS;
use crate::kernels::cpu::isa::Isa;
use crate::kernels::cpu::linear::Linear;
use crate::kernels::cpu::tile::{Kernel, KernelSpec, Launch, Refusal};
use crate::kernels::cuda::{CudaSpec, Module};
use crate::kernels::mps::MpsSpec;
use crate::kernels::{cuda, mps};
use leasehold::kernel::{
    Grid, KernelBase, KernelCheck, KernelDesc, KernelSource, LaunchInfo, Overlap, Registry,
    TensorMap,
};
use leasehold::{Access, Buffer, Error, Lease, Result, Runtime};
use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// The architecture name under which a level's kernels are registered.
#[must_use]
pub fn arch_of(isa: Isa) -> String {
    match isa {
        Isa::Generic => "cpu".to_owned(),
        other => format!("cpu/{other}"),
    }
}

pub use crate::kernels::cuda::CUDA;
/// The architecture name of the Metal kernels, which drivers compile for every family.
pub const MPS: &str = "mps";
/// The architecture name of a simulated device, which finds the kernels by their names.
pub const SIM: &str = "sim";

/// Registers every operator kernel, for every architecture of this build that can run here.
///
/// # Errors
/// `InvalidArgument` if one of the names is registered already.
pub fn register(registry: &Registry) -> Result<()> {
    // SAFETY: these are the modules' own sources.
    unsafe { register_with(registry, &Module::kernel_source) }
}

/// As [`register`], with what `source` gives as the code of a CUDA module.
///
/// # Safety
/// - As [`Library::with_sources`].
unsafe fn register_with(
    registry: &Registry,
    source: &dyn Fn(&Module) -> KernelSource<'static>,
) -> Result<()> {
    for spec in KERNELS {
        // A variant for instructions that this machine lacks would end the process.
        for &(isa, entry) in spec.variants.iter().filter(|(isa, _)| isa.available()) {
            let desc = describe(spec, Division::Tiles, isa.name().into(), KernelSource::Cpu(entry));
            // SAFETY: `Kernel::tile` accepts every launch that the check accepts, on a machine that
            // supports the level. This machine supports it, and CPU kernels run here only.
            unsafe { registry.register(&arch_of(isa), desc) }?;
        }
    }
    for cuda in cuda::KERNELS {
        let (spec, blocks) = (signature(cuda.name)?, Division::Blocks(cuda));
        let named = KernelSource::Registered(spec.name.into());
        // SAFETY: the function of that name runs the CPU kernel over the tiles that the parameters
        // require, and checks them again.
        unsafe { registry.register(SIM, describe(spec, blocks, spec.name.into(), named)) }?;
        let code = source(cuda.module);
        // SAFETY: the source accepts every launch that the check accepts. It has the CPU kernel's
        // operands and indexes them by the parameters alone, within the sizes that the plan
        // requires. It checks values that it reads from memory.
        unsafe { registry.register(CUDA, describe(spec, blocks, spec.name.into(), code)) }?;
    }
    for mps in mps::KERNELS {
        let (spec, groups) = (signature(mps.name)?, Division::Groups(mps));
        let msl = KernelSource::Msl(mps.module.source.into());
        // SAFETY: the source accepts every launch that the check accepts. It has the CPU kernel's
        // operands and indexes them by the parameters alone, within the sizes that the plan
        // requires. It checks values that it reads from memory.
        unsafe { registry.register(MPS, describe(spec, groups, spec.name.into(), msl)) }?;
    }
    for cuda in cuda::TENSOR_KERNELS {
        let (spec, blocks) = (signature(cuda.name)?, Division::Blocks(cuda));
        for arch in cuda.archs {
            let code = source(cuda.module);
            let desc = describe(spec, blocks, cuda.entry.into(), code);
            // SAFETY: as a source for all CUDA devices, for launches whose parameters the check
            // finds taken.
            unsafe { registry.register(arch, KernelDesc { name: cuda.entry.into(), ..desc }) }?;
        }
    }
    Ok(())
}

/// Bytes of a tensor map.
const MAP: usize = TensorMap::BYTES as usize;

fn signature(name: &str) -> Result<&'static KernelSpec> {
    KernelSpec::find(name).ok_or_else(|| {
        Error::NotFound(
            format!("no operator kernel is named {name:?}; kernels::cpu::KERNELS has their names")
                .into(),
        )
    })
}

fn describe(
    spec: &'static KernelSpec,
    division: Division,
    entry: Cow<'static, str>,
    source: KernelSource<'static>,
) -> KernelDesc<'static> {
    let bindings: Vec<Access> = spec.operands.iter().map(|o| o.access).collect();
    let check = KernelCheck::new(move |launch| {
        division.accepts(spec, launch).map_err(Error::InvalidArgument)
    });
    let maps = match division {
        Division::Blocks(cuda) => cuda.mapped(),
        Division::Tiles | Division::Groups(_) => &[],
    };
    let maps: Vec<_> = std::iter::zip(maps.iter().copied(), (0..).step_by(MAP)).collect();
    let limits = spec.limited().map_or(Cow::Borrowed(&[][..]), |limits| vec![limits].into());
    KernelDesc {
        entry,
        limits,
        params: (maps.len() * MAP + spec.params_bytes) as u32,
        maps: maps.into(),
        overlap: if spec.in_place { Overlap::InPlace } else { Overlap::Refused },
        // Of the sources, those in CUDA C++ wait: all call `begin` or `wait_for_previous`.
        dependent_launch: matches!(division, Division::Blocks(_)),
        early_reads: match division {
            Division::Blocks(cuda) => cuda.early_reads(spec),
            Division::Tiles | Division::Groups(_) => 0,
        },
        ..KernelDesc::new(spec.name, source, &bindings, check)
    }
}

/// The division of a launch: into tiles of the CPU, into blocks of CUDA (whose geometry a
/// simulated device gets too), or into threadgroups of Metal.
#[derive(Debug, Clone, Copy)]
enum Division {
    Tiles,
    Blocks(&'static CudaSpec),
    Groups(&'static MpsSpec),
}

impl Division {
    /// The requirements and the shape of a launch.
    fn plan(
        self,
        spec: &'static KernelSpec,
        params: &[u8],
    ) -> std::result::Result<(Launch, Grid), Refusal> {
        let launch = spec.plan(params)?;
        let geometry = match self {
            Division::Tiles => Grid::new(launch.grid),
            Division::Groups(mps) => mps.geometry(params)?,
            Division::Blocks(cuda) if cuda.takes(params) => cuda.geometry(params)?,
            Division::Blocks(cuda) => {
                return Err(format!("{} does not take these parameters", cuda.entry).into());
            }
        };
        Ok((launch, geometry))
    }

    /// The bytes of a launch with these parameters: tensor maps go in front.
    fn launched(self, params: &[u8]) -> Cow<'_, [u8]> {
        match self {
            Division::Blocks(cuda) if !cuda.mapped().is_empty() => cuda.launched(params).into(),
            _ => params.into(),
        }
    }

    /// The parameters in the bytes of a launch.
    fn params_in(self, launched: &[u8]) -> std::result::Result<&[u8], Refusal> {
        match self {
            Division::Blocks(cuda) => cuda.params_in(launched),
            Division::Tiles | Division::Groups(_) => Ok(launched),
        }
    }

    /// Checks that a launch has the shape that its parameters require, and operands that meet the
    /// requirements.
    fn accepts(
        self,
        spec: &'static KernelSpec,
        bound: &LaunchInfo<'_>,
    ) -> std::result::Result<(), Refusal> {
        let params = self.params_in(bound.params_bytes())?;
        let (launch, geometry) = self.plan(spec, params)?;
        if *self.launched(params) != *bound.params_bytes() {
            return Err("tensor maps are not those that the parameters ask for".into());
        }
        let shape = Grid::new(bound.grid).threads(bound.block).shared(bound.shared);
        if shape != geometry {
            return Err(
                format!("a launch of {shape:?}; its parameters ask for {geometry:?}").into()
            );
        }
        spec.check_bound(&launch, bound)
    }

    /// The entry of kernel `name` on the first architecture of `archs` that the build has kernels
    /// for.
    fn of(name: &str, archs: &[String]) -> Option<Self> {
        archs.iter().find_map(|arch| match arch.as_str() {
            CUDA | SIM => CudaSpec::find(name).map(Self::Blocks),
            MPS => MpsSpec::find(name).map(Self::Groups),
            cpu if cpu.split('/').next() == Some("cpu") => Some(Self::Tiles),
            _ => None,
        })
    }
}

/// A kernel, resolved for a device.
#[derive(Debug, Clone)]
pub struct Resolved {
    base: KernelBase,
    spec: &'static KernelSpec,
    division: Division,
}

impl Resolved {
    /// The kernel's key and cache of pipelines. Every launch is checked against
    /// [`plan`](Self::plan).
    pub fn base(&self) -> &KernelBase {
        &self.base
    }

    /// The kernel's signature and checks, which are the same on every device.
    #[must_use]
    pub fn spec(&self) -> &'static KernelSpec {
        self.spec
    }

    /// The name of the entry that a launch runs.
    #[must_use]
    pub fn entry(&self) -> &'static str {
        match self.division {
            Division::Tiles => self.spec.name,
            Division::Blocks(cuda) => cuda.entry,
            Division::Groups(mps) => mps.name,
        }
    }

    /// The bytes that a launch with these parameters passes: the kernel's tensor maps, and they.
    #[must_use]
    pub fn launched(&self, params: &[u8]) -> Vec<u8> {
        self.division.launched(params).into_owned()
    }

    /// The operands of the kernel's tensor maps, which lie at multiples of 16 bytes.
    #[must_use]
    pub fn mapped(&self) -> &'static [u32] {
        match self.division {
            Division::Blocks(cuda) => cuda.mapped(),
            Division::Tiles | Division::Groups(_) => &[],
        }
    }

    /// The requirements of a launch, and its shape on this device.
    ///
    /// # Errors
    /// The reason, if the parameters describe no computation of the kernel, or exceed the limits of
    /// this device.
    pub fn plan(&self, params: &[u8]) -> std::result::Result<(Launch, Grid), Refusal> {
        self.division.plan(self.spec, params)
    }
}

/// The operator library of one runtime.
///
/// ```
/// use leasehold::{DeviceId, Runtime};
/// use leasehold_operators::Library;
/// # fn main() -> leasehold::Result<()> {
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let library = Library::of(&runtime)?;
/// assert!(library.kernel("rms_norm").is_ok());
/// # Ok(())
/// # }
/// ```
#[doc(alias("infiniopHandle_t", "infiniOP"))]
pub struct Library {
    kernels: HashMap<&'static str, Resolved>,
    /// Kernels for some parameters, preferred to those above.
    preferred: Vec<Resolved>,
    none: Lease<Buffer>,
    #[cfg(feature = "cuda")]
    gemm: Option<Arc<crate::gemm::Gemm>>,
}

impl Library {
    /// The library of a runtime, made at the first call.
    ///
    /// # Errors
    /// `Unsupported` on a device for which the build has no kernels.
    pub fn of(runtime: &Runtime) -> Result<Arc<Library>> {
        runtime.extension(Self::new)
    }

    /// A separate library whose kernels have one level (or the best level of the device), to
    /// compare levels.
    ///
    /// # Errors
    /// `Unsupported` if the device does not support that level.
    pub fn with_level(runtime: &Runtime, isa: Option<Isa>) -> Result<Library> {
        let registry = Registry::new();
        register(&registry)?;
        Self::of_registry(runtime, &registry, isa)
    }

    /// A separate library whose CUDA kernels are what `source` gives for each module, to measure
    /// kernels. As the runtime's extension it is the library of all operators of this runtime:
    /// `runtime.extension(|r| unsafe { Library::with_sources(r, &source) })`, before the first
    /// operator.
    ///
    /// # Errors
    /// `Unsupported` on a device for which the build has no kernels.
    ///
    /// # Safety
    /// - The code that `source` gives has the module's kernels. They accept every launch that those
    ///   of the module's own source accept, and access no other memory of operands.
    pub unsafe fn with_sources(
        runtime: &Runtime,
        source: &dyn Fn(&Module) -> KernelSource<'static>,
    ) -> Result<Library> {
        let registry = Registry::new();
        // SAFETY: this function's own condition.
        unsafe { register_with(&registry, source) }?;
        Self::of_registry(runtime, &registry, None)
    }

    fn of_registry(runtime: &Runtime, registry: &Registry, isa: Option<Isa>) -> Result<Library> {
        let mut info = runtime.info().clone();
        if let Some(isa) = isa {
            let arch = arch_of(isa);
            if !isa.available() || !info.arch.contains(&arch) {
                return Err(Error::Unsupported(
                    format!("{} does not run {isa} kernels; leave the level out, and the library selects one", info.id).into(),
                ));
            }
            info.arch = vec![arch];
        }
        let kernels = KERNELS
            .iter()
            .map(|spec| {
                let base = registry.resolve(spec.name, &info)?;
                let division = Division::of(spec.name, &info.arch).ok_or_else(|| {
                    Error::Unsupported(
                        format!("{} runs none of the kernels; use another device", info.id).into(),
                    )
                })?;
                Ok((spec.name, Resolved { base, spec, division }))
            })
            .collect::<Result<HashMap<_, _>>>()?;
        let preferred = cuda::TENSOR_KERNELS.iter().filter_map(|cuda| {
            let base = registry.resolve(cuda.entry, &info).ok()?;
            let spec = KernelSpec::find(cuda.name)?;
            // Drivers before CUDA 12.4 do not say where a function takes tensor maps.
            let refused = || matches!(base.prepare(runtime), Err(Error::Unsupported(_)));
            if !cuda.mapped().is_empty() && refused() {
                return None;
            }
            Some(Resolved { base, spec, division: Division::Blocks(cuda) })
        });
        Ok(Self {
            kernels,
            preferred: preferred.collect(),
            none: runtime.alloc(0)?,
            #[cfg(feature = "cuda")]
            gemm: crate::gemm::Gemm::new(runtime)?,
        })
    }

    fn new(runtime: &Runtime) -> Result<Library> {
        Self::with_level(runtime, None)
    }

    /// The kernel with this name.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn kernel(&self, name: &str) -> Result<&Resolved> {
        self.kernels.get(name).ok_or_else(|| {
            Error::NotFound(
                format!(
                    "no operator kernel is named {name:?}; kernels::cpu::KERNELS has their names"
                )
                .into(),
            )
        })
    }

    /// The kernel to launch for parameters: a kernel for tensor cores, if the device has them and
    /// the kernel takes the parameters, and its tensor maps the operands. `is_aligned` says
    /// whether an operand lies at a multiple of 16 bytes.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn kernel_for(
        &self,
        name: &str,
        params: &[u8],
        is_aligned: impl Fn(u32) -> bool,
    ) -> Result<&Resolved> {
        let takes = |k: &&Resolved| {
            k.spec.name == name
                && k.mapped().iter().all(|&i| is_aligned(i))
                && k.plan(params).is_ok()
        };
        self.preferred.iter().find(takes).map_or_else(|| self.kernel(name), Ok)
    }

    /// Returns whether a library of the device's vendor computes products of `rows` rows with a
    /// matrix of `elements`: cuBLASLt on CUDA, for 33 rows and more, or 17 and a matrix of 2^25
    /// elements, if the machine has it, the environment does not name `LEASEHOLD_NO_CUBLASLT`, and
    /// all matrices are of one of the types bf16 and f16. A `y` of f32 is one of those too, if
    /// there is no bias. Otherwise the kernels of this crate do, and where kernels with tensor maps
    /// are faster: for smaller matrices and up to 64 rows, on devices of compute capability 9.0.
    /// The first call for many rows loads the vendor's library.
    #[must_use]
    pub fn has_vendor_products(&self, rows: u32, elements: u64) -> bool {
        #[cfg(feature = "cuda")]
        return crate::gemm::is_faster(rows, elements)
            && self.gemm.as_ref().is_some_and(|g| g.is_present());
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (rows, elements);
            false
        }
    }

    /// Returns whether the device has kernels for tensor cores that compute products of two rows
    /// and more, if `x` and the weights are of one of the types bf16 and f16. These kernels do not
    /// normalise `x`.
    #[must_use]
    pub fn has_tensor_products(&self) -> bool {
        self.preferred.iter().any(|kernel| kernel.spec.name == Linear::NAME)
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn gemm(&self) -> Option<&Arc<crate::gemm::Gemm>> {
        self.gemm.as_ref()
    }

    /// The buffer that is bound for an omitted operand.
    pub(crate) fn none(&self) -> &Lease<Buffer> {
        &self.none
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Library({} kernels)", self.kernels.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold::{DeviceId, DeviceInfo};

    #[test]
    fn only_kernels_that_this_machine_can_run_are_registered() {
        let registry = Registry::new();
        register(&registry).expect("fresh names");
        for spec in KERNELS {
            for &(isa, _) in spec.variants {
                let mut device = DeviceInfo::new(DeviceId::cpu(0), "the processor");
                device.arch = vec![arch_of(isa)];
                let found = registry.resolve(spec.name, &device);
                assert_eq!(found.is_ok(), isa.available(), "{} for {isa}", spec.name);
            }
        }
    }
}
