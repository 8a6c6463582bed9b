//! The library: the kernels of one runtime, resolved for its device, in the runtime's extension slot.
//!
//! This module must not know what the kernels compute.

use crate::kernels::cpu::KERNELS;
use crate::kernels::cpu::isa::Isa;
use crate::kernels::cpu::tile::{KernelSpec, Launch, Refusal};
use crate::kernels::cuda::CudaSpec;
use crate::kernels::{Geometry, cuda};
use leasehold::kernel::{KernelBase, KernelDesc, KernelSource, Registry};
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

/// The architecture name under which the CUDA kernels are registered: PTX, which drivers translate for every device.
pub const CUDA: &str = "cuda";
/// The architecture name of a simulated device, which knows the kernels by their names.
pub const SIM: &str = "sim";

/// Registers every operator kernel, for every architecture that this build has it for.
///
/// # Errors
/// `InvalidArgument` when one of the names is taken already.
pub fn register(registry: &Registry) -> Result<()> {
    for spec in KERNELS {
        for &(isa, entry) in spec.variants {
            registry.register(&arch_of(isa), describe(spec, isa.name().into(), KernelSource::Cpu(entry)))?;
        }
        registry.register(SIM, describe(spec, spec.name.into(), KernelSource::Registered(spec.name.into())))?;
    }
    for spec in cuda::KERNELS {
        let ptx = KernelSource::Ptx(spec.module.ptx.into());
        registry.register(CUDA, describe(signature(spec.name)?, spec.name.into(), ptx))?;
    }
    Ok(())
}

fn signature(name: &str) -> Result<&'static KernelSpec> {
    KernelSpec::find(name).ok_or_else(|| Error::NotFound(format!("no operator kernel is named {name:?}").into()))
}

fn describe(spec: &'static KernelSpec, entry: Cow<'static, str>, source: KernelSource<'static>) -> KernelDesc<'static> {
    let bindings: Vec<Access> = spec.operands.iter().map(|o| o.access).collect();
    KernelDesc { name: spec.name.into(), entry, source, bindings: bindings.into(), params: spec.params_bytes as u32 }
}

/// How a launch is divided: by tiles of the CPU, or by blocks of CUDA (whose geometry a simulated device is given too).
#[derive(Debug, Clone, Copy)]
enum Division {
    Tiles,
    Blocks(&'static CudaSpec),
}

impl Division {
    /// Of kernel `name` on the first architecture of `archs` that the build has kernels for.
    fn of(name: &str, archs: &[String]) -> Option<Self> {
        archs.iter().find_map(|arch| match arch.as_str() {
            CUDA | SIM => CudaSpec::find(name).map(Self::Blocks),
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
    /// The kernel's key and cache of pipelines.
    pub fn base(&self) -> &KernelBase {
        &self.base
    }

    /// Its signature and checks, which are the same on every device.
    #[must_use]
    pub fn spec(&self) -> &'static KernelSpec {
        self.spec
    }

    /// What a launch needs, and its shape on this device.
    ///
    /// # Errors
    /// The reason, where the parameters describe nothing that the kernel computes, or nothing that it can on this device.
    pub fn plan(&self, params: &[u8]) -> std::result::Result<(Launch, Geometry), Refusal> {
        let launch = self.spec.plan(params)?;
        let geometry = match self.division {
            Division::Tiles => Geometry { grid: launch.grid, block: [1; 3] },
            Division::Blocks(cuda) => cuda.geometry(params)?,
        };
        Ok((launch, geometry))
    }
}

/// The operator library of one runtime.
///
/// ```
/// use leasehold::{Context, DeviceId};
/// use leasehold_operators::Library;
/// # fn main() -> leasehold::Result<()> {
/// let runtime = Context::new().runtime(DeviceId::cpu(0))?;
/// let library = Library::of(&runtime)?;
/// assert!(library.kernel("rms_norm").is_ok());
/// # Ok(())
/// # }
/// ```
#[doc(alias("infiniopHandle_t", "infiniOP"))]
pub struct Library {
    kernels: HashMap<&'static str, Resolved>,
    none: Lease<Buffer>,
}

impl Library {
    /// The library of a runtime; made when first asked for.
    ///
    /// # Errors
    /// `Unsupported` on a device for which the build has no kernels.
    pub fn of(runtime: &Runtime) -> Result<Arc<Library>> {
        runtime.extension(Self::new)
    }

    /// A library of its own, whose kernels are of one level (or the best that the device runs): for comparing levels.
    ///
    /// # Errors
    /// `Unsupported` when the device does not run that level.
    pub fn with_level(runtime: &Runtime, isa: Option<Isa>) -> Result<Library> {
        let registry = Registry::new();
        register(&registry)?;
        let mut info = runtime.info().clone();
        if let Some(isa) = isa {
            let arch = arch_of(isa);
            if !isa.available() || !info.arch.contains(&arch) {
                return Err(Error::Unsupported(format!("{} does not run {isa} kernels", info.id).into()));
            }
            info.arch = vec![arch];
        }
        let kernels = KERNELS
            .iter()
            .map(|spec| {
                let base = registry.resolve_for(spec.name, &info)?;
                let division = Division::of(spec.name, &info.arch)
                    .ok_or_else(|| Error::Unsupported(format!("{} runs none of the kernels", info.id).into()))?;
                Ok((spec.name, Resolved { base, spec, division }))
            })
            .collect::<Result<HashMap<_, _>>>()?;
        Ok(Self { kernels, none: runtime.alloc(0)? })
    }

    fn new(runtime: &Runtime) -> Result<Library> {
        Self::with_level(runtime, None)
    }

    /// The kernel of a name.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn kernel(&self, name: &str) -> Result<&Resolved> {
        self.kernels.get(name).ok_or_else(|| Error::NotFound(format!("no operator kernel is named {name:?}").into()))
    }

    /// What is bound where an operand is left out.
    pub(crate) fn none(&self) -> &Lease<Buffer> {
        &self.none
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Library({} kernels)", self.kernels.len())
    }
}
