//! The library: the kernels of one runtime, resolved for its device, in the runtime's extension slot.
//!
//! This module must not know what the kernels compute.

use crate::kernels::cpu::KERNELS;
use crate::kernels::cpu::isa::Isa;
use crate::kernels::cpu::tile::KernelSpec;
use leasehold::kernel::{KernelBase, KernelDesc, KernelSource, Registry};
use leasehold::{Access, Buffer, Error, Lease, Result, Runtime};
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

/// Registers every operator kernel, for every architecture that this build has it for.
///
/// # Errors
/// `InvalidArgument` when one of the names is taken already.
pub fn register(registry: &Registry) -> Result<()> {
    for spec in KERNELS {
        for &(isa, entry) in spec.variants {
            registry.register(&arch_of(isa), describe(spec, isa, entry))?;
        }
    }
    Ok(())
}

fn describe(spec: &'static KernelSpec, isa: Isa, entry: leasehold::kernel::CpuFn) -> KernelDesc<'static> {
    let bindings: Vec<Access> = spec.operands.iter().map(|o| o.access).collect();
    KernelDesc {
        name: spec.name.into(),
        entry: isa.name().into(),
        source: KernelSource::Cpu(entry),
        bindings: bindings.into(),
        params: spec.params_bytes as u32,
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
    kernels: HashMap<&'static str, KernelBase>,
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
            .map(|spec| Ok((spec.name, registry.resolve_for(spec.name, &info)?)))
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
    pub fn kernel(&self, name: &str) -> Result<&KernelBase> {
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
