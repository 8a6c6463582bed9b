//! Modules: images that the driver has loaded. Each image is loaded once while a function of it
//! exists.
//!
//! This module must not know which functions are used.

use crate::driver::ops::NativeModule;
use crate::engine::core::Core;
use crate::engine::driver_context::DriverContext;
use leasehold_core::sync::Arc;
use leasehold_core::{
    Error, Handle, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource, Result, Tagged,
    tags,
};
use leasehold_hal::{Cubin, KernelDesc, KernelSource};
use std::fmt;
use std::marker::PhantomPinned;

/// A loaded image.
pub struct ModuleState {
    pub(crate) native: NativeModule,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl Tagged for ModuleState {
    type Tag = tags::Library;
}

impl fmt::Debug for ModuleState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ModuleState({:#x})", self.native.0)
    }
}

/// The code of a module.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Image {
    /// CUDA C++ and the compiler's options.
    Source(Box<str>, Box<[String]>),
    /// PTX.
    Ptx(Box<str>),
    /// Machine code for the context's device, and the PTX in case the driver refuses the code.
    Cubin(Cubin<'static>, Box<str>),
}

impl Image {
    /// The image of a kernel for a device.
    ///
    /// # Errors
    /// `Unsupported` for a source of another backend.
    pub(crate) fn of(desc: &KernelDesc<'_>, compute_capability: (u32, u32)) -> Result<Self> {
        match &desc.source {
            KernelSource::CudaC { source, options } => {
                Ok(Image::Source(source.as_ref().into(), options.as_ref().into()))
            }
            KernelSource::Ptx(text) => Ok(Image::Ptx(text.as_ref().into())),
            KernelSource::Cubins { images, ptx } => {
                Ok(match Cubin::select(images, compute_capability) {
                    Some(cubin) => Image::Cubin(cubin.clone().into_owned(), ptx.as_ref().into()),
                    None => Image::Ptx(ptx.as_ref().into()),
                })
            }
            other => Err(Error::Unsupported(
                format!(
                    "kernel {}: CUDA runs CUDA C++, PTX and CUDA machine code, not {}",
                    desc.name,
                    other.kind()
                )
                .into(),
            )),
        }
    }
}

struct Modules {
    context: Arc<DriverContext>,
    compute_capability: (u32, u32),
}

impl Resource for Modules {
    type Payload = ModuleState;
    type Request<'a> = (&'a Image, &'a str);
    const NAME: &'static str = "module";

    fn create(
        &self,
        _: Handle<tags::Library>,
        (image, name): &(&Image, &str),
    ) -> Result<ModuleState> {
        let native = match image {
            Image::Ptx(text) => self.context.within(|ops| ops.module_load(text.as_bytes()))?,
            Image::Cubin(cubin, ptx) => self.context.within(|ops| {
                // SAFETY: the cubin is whole, as its maker vouched.
                match unsafe { ops.module_load_cubin(cubin.image()) } {
                    Err(Error::Compile { .. }) => ops.module_load(ptx.as_bytes()),
                    loaded => loaded,
                }
            })?,
            Image::Source(source, options) => {
                let ptx =
                    self.context.ops().compile(source, name, options, self.compute_capability)?;
                self.context.within(|ops| ops.module_load(&ptx))?
            }
        };
        Ok(ModuleState { native, _place: PhantomPinned })
    }

    fn recycle(&self, _: &mut ModuleState) -> Recycle {
        Recycle::Destroy
    }

    /// A module ends with its last function, when no work runs that may use it. The caller may
    /// block.
    fn destroy(&self, module: ModuleState) {
        // SAFETY: the module was made for this payload, whose last lease is gone. Every function
        // holds a lease on its module.
        self.context.release_or_log(|ops| unsafe { ops.module_unload(module.native) });
    }
}

/// Owns the modules of a context.
#[doc(alias = "CudaModuleManager")]
#[derive(Debug)]
pub struct ModuleManager {
    manager: PoolManager<Modules, Image>,
    context: Arc<DriverContext>,
}

impl ModuleManager {
    pub(crate) fn new(core: &Core) -> Result<Self> {
        let manager = PoolManager::new();
        let modules = Modules {
            context: core.context.clone(),
            compute_capability: core.properties().compute_capability,
        };
        manager.configure(modules, PoolConfig::default())?;
        Ok(Self { manager, context: core.context.clone() })
    }

    /// Whether this manager's modules are loaded in this context.
    pub(crate) fn is_of(&self, core: &Core) -> bool {
        Arc::ptr_eq(&self.context, &core.context)
    }

    /// The module of an image. Blocks while the image is compiled. The module lives as long as it
    /// has a holder.
    ///
    /// # Errors
    /// `Compile` with the log; `Unavailable` without a compiler; a driver error.
    pub(crate) fn get_or_create(&self, image: &Image, name: &str) -> Result<Lease<ModuleState>> {
        self.manager.find_or_create(image, &(image, name))
    }

    /// The pool's statistics.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }

    /// Shuts the manager down.
    ///
    /// # Errors
    /// `LeasesOutstanding`. After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        self.manager.shutdown()
    }
}
