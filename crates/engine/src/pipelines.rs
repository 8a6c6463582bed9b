//! The pool of a device's kernels: one pipeline for each name, entry and source.
//!
//! This module must not know how a driver loads a kernel.

use leasehold_core::{
    Error, Handle, Lease, PoolConfig, PoolManager, Recycle, Resource, Result, Tagged, tags,
};
use leasehold_hal::{KernelDesc, Pipeline};
use std::fmt;
use std::hash::Hash;

/// A driver's part of the pool: loading a kernel.
pub trait PipelineLoader: Send + Sync + 'static {
    /// The code of a kernel, as a part of the pool's key.
    type Source: Clone + Eq + Hash + Send + Sync + 'static;
    /// The means of one request, beside the loader itself.
    type Means<'a>;
    /// The object that a pipeline keeps alive, such as a lease on a loaded library.
    type Kept: Send + Sync + 'static;

    /// Loads a kernel. May block on the driver and on a compiler.
    ///
    /// # Errors
    /// `Compile`, `NotFound`, or the driver's.
    fn load(
        &self,
        desc: &KernelDesc<'_>,
        source: &Self::Source,
        means: &Self::Means<'_>,
    ) -> Result<(Pipeline, Self::Kept)>;

    /// Forgets a pipeline that ends: its native word may name another pipeline from now on.
    fn forget(&self, pipeline: &Pipeline) {
        let _ = pipeline;
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Key<S> {
    name: Box<str>,
    entry: Box<str>,
    source: S,
}

/// A pipeline, and the object that the pipeline needs.
struct Loaded<K> {
    pipeline: Pipeline,
    _kept: K,
}

impl<K> Tagged for Loaded<K> {
    type Tag = tags::Pipeline;
}

/// A request: the description, its source, and the means to load the kernel.
struct Wanted<'a, L: PipelineLoader> {
    desc: &'a KernelDesc<'a>,
    source: &'a L::Source,
    means: &'a L::Means<'a>,
}

struct Loads<L>(L);

impl<L: PipelineLoader> Resource for Loads<L> {
    type Payload = Loaded<L::Kept>;
    type Request<'a> = Wanted<'a, L>;
    const NAME: &'static str = "pipeline";

    fn create(&self, _: Handle<tags::Pipeline>, wanted: &Wanted<'_, L>) -> Result<Loaded<L::Kept>> {
        let (pipeline, kept) = self.0.load(wanted.desc, wanted.source, wanted.means)?;
        Ok(Loaded { pipeline, _kept: kept })
    }

    fn recycle(&self, _: &mut Loaded<L::Kept>) -> Recycle {
        Recycle::Destroy
    }

    fn destroy(&self, loaded: Loaded<L::Kept>) {
        self.0.forget(&loaded.pipeline);
    }
}

/// Owns the pipelines of a device or context.
pub struct PipelinePool<L: PipelineLoader> {
    manager: PoolManager<Loads<L>, Key<L::Source>>,
}

impl<L: PipelineLoader> PipelinePool<L> {
    /// A pool without pipelines.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new(loader: L) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(Loads(loader), PoolConfig { block: 64, ..PoolConfig::default() })?;
        Ok(Self { manager })
    }

    /// The pipeline of a kernel, whose description the caller has validated. The first call for a
    /// key loads the kernel, and blocks meanwhile.
    ///
    /// # Errors
    /// - `InvalidArgument` for a declaration that differs from the one of the same key.
    /// - As [`PipelineLoader::load`].
    pub fn get_or_create<'a>(
        &self,
        desc: &'a KernelDesc<'a>,
        source: &'a L::Source,
        means: &'a L::Means<'a>,
    ) -> Result<Lease<Pipeline>> {
        let key = Key {
            name: desc.name.as_ref().into(),
            entry: desc.entry.as_ref().into(),
            source: source.clone(),
        };
        let loaded = self.manager.get_or_create(&key, &Wanted { desc, source, means })?;
        let pipeline = &loaded.pipeline;
        if *pipeline.bindings != *desc.bindings || pipeline.params != desc.params {
            return Err(Error::invalid(format!(
                "kernel {}: it was made ready before with other bindings or parameters",
                desc.name
            )));
        }
        Ok(Lease::map(loaded, |l| &l.pipeline))
    }

    crate::pool_methods!(manager: "pipelines");
}

impl<L: PipelineLoader> fmt::Debug for PipelinePool<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PipelinePool").field(&self.manager.stats()).finish()
    }
}
