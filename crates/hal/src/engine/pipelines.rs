//! The pool of a device's kernels: one pipeline for each name, entry and source.
//!
//! The holders of a pipeline own it: bases of kernels, recorded graphs, submissions that the host
//! holds back. It ends after its last holder and its last launch. The pool keeps no lease of its
//! own.
//!
//! A driver's launch may hold no lease. Such a driver tells which work is pending when the last
//! lease is dropped. The pipeline then waits on a retire list for the end of this work. The next
//! creation, a synchronisation, `trim` and `shutdown` end what is ready. The drop of a lease calls
//! no driver.
//!
//! This module must not know how a driver loads a kernel.

use crate::{KernelDesc, KernelSource, Pipeline};
use leasehold_core::sync::Arc;
use leasehold_core::{
    Error, Handle, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource, Result,
    RetireList, Tagged, Timepoint, tags,
};
use std::fmt;
use std::hash::Hash;

/// A driver's part of the pool: loading a kernel.
pub trait PipelineLoader: Send + Sync + 'static {
    /// The code of a kernel, as a part of the pool's key.
    type Source: Eq + Hash + Clone + Send + Sync + 'static;
    /// The means of one request, beside the loader itself.
    type Means;
    /// The object that a pipeline keeps alive, such as a lease on a loaded library.
    type Kept: Send + Sync + 'static;

    /// The code of a kernel. Checks the kernel and the means, and does not block.
    ///
    /// # Errors
    /// `Unsupported` for a source of another backend; `NotFound` or `InvalidArgument` for a kernel
    /// or means that the device refuses.
    fn source(&self, desc: &KernelDesc<'_>, means: &Self::Means) -> Result<Self::Source>;

    /// Loads a kernel. May block on the driver and on a compiler.
    ///
    /// # Errors
    /// `Compile`, `NotFound`, or the driver's.
    fn load(
        &self,
        desc: &KernelDesc<'_>,
        source: &Self::Source,
        means: &Self::Means,
    ) -> Result<(Pipeline, Self::Kept)>;

    /// Forgets a pipeline that ends: its native word may name another pipeline from now on.
    fn forget(&self, pipeline: &Pipeline) {
        let _ = pipeline;
    }

    /// The pending work that may use a pipeline without a lease on it, for a pipeline whose last
    /// lease was dropped just now. `None` if work holds leases, and if the end of a pipeline calls
    /// no driver that may block. Such a pipeline ends at once. Must not block.
    fn pending(&self) -> Option<Vec<Timepoint>> {
        None
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Key<S> {
    name: Box<str>,
    entry: Box<str>,
    source: S,
    cluster: [u32; 3],
    cooperative: bool,
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
    means: &'a L::Means,
}

/// A pipeline without a lease, and the work that may use it.
struct Ended<L: PipelineLoader> {
    loaded: Loaded<L::Kept>,
    after: Vec<Timepoint>,
}

/// The backend's own loader, and the pipelines that wait for their end.
struct Loader<L: PipelineLoader> {
    own: L,
    ended: RetireList<Ended<L>>,
}

impl<L: PipelineLoader> Loader<L> {
    fn end(&self, loaded: Loaded<L::Kept>) {
        self.own.forget(&loaded.pipeline);
    }
}

struct Loads<L: PipelineLoader>(Arc<Loader<L>>);

impl<L: PipelineLoader> Resource for Loads<L> {
    type Payload = Loaded<L::Kept>;
    type Request<'a> = Wanted<'a, L>;
    const NAME: &'static str = "pipeline";

    fn create(&self, _: Handle<tags::Pipeline>, wanted: &Wanted<'_, L>) -> Result<Loaded<L::Kept>> {
        let (pipeline, kept) = self.0.own.load(wanted.desc, wanted.source, wanted.means)?;
        Ok(Loaded { pipeline, _kept: kept })
    }

    fn recycle(&self, _: &mut Loaded<L::Kept>) -> Recycle {
        Recycle::Destroy
    }

    fn destroy(&self, loaded: Loaded<L::Kept>) {
        match self.0.own.pending() {
            None => self.0.end(loaded),
            Some(after) => self.0.ended.push(Ended { loaded, after }),
        }
    }
}

/// Owns the kernels of a device or context, as pipelines: one for each name, entry and source.
pub struct PipelinePool<L: PipelineLoader> {
    manager: PoolManager<Loads<L>, Key<L::Source>>,
    loader: Arc<Loader<L>>,
}

impl<L: PipelineLoader> PipelinePool<L> {
    /// A pool without pipelines.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new(loader: L) -> Result<Self> {
        let manager = PoolManager::new();
        let loader = Arc::new(Loader { own: loader, ended: RetireList::new() });
        let config = PoolConfig { block: 64, ..PoolConfig::default() };
        manager.configure(Loads(loader.clone()), config)?;
        Ok(Self { manager, loader })
    }

    /// The pipeline of a kernel, which lives as long as it has a holder. Unless the key's pipeline
    /// has a holder, the call loads the kernel, and blocks meanwhile.
    ///
    /// # Errors
    /// - `InvalidArgument` beyond the limits, and for a declaration that differs from the one of
    ///   the same key.
    /// - `Unsupported` for clusters and cooperative launches of sources that are not CUDA's.
    /// - As [`PipelineLoader::source`] and [`PipelineLoader::load`].
    pub fn get_or_create(
        &self,
        desc: &KernelDesc<'_>,
        means: &L::Means,
    ) -> Result<Lease<Pipeline>> {
        desc.validate()?;
        let source = &self.loader.own.source(desc, means)?;
        use KernelSource::{Cubins, CudaC, Ptx};
        if desc.has_attributes() && !matches!(desc.source, CudaC { .. } | Cubins { .. } | Ptx(_)) {
            return Err(Error::Unsupported(
                format!(
                    "kernel {}: {} has no clusters of blocks and no cooperative launch; describe this source without cluster and cooperative",
                    desc.name,
                    desc.source.kind()
                )
                .into(),
            ));
        }
        self.collect();
        let key = Key {
            name: desc.name.as_ref().into(),
            entry: desc.entry.as_ref().into(),
            source: source.clone(),
            cluster: desc.cluster,
            cooperative: desc.cooperative,
        };
        let loaded = self.manager.find_or_create(&key, &Wanted { desc, source, means })?;
        let pipeline = &loaded.pipeline;
        if *pipeline.bindings != *desc.bindings || pipeline.params != desc.params {
            return Err(Error::invalid(format!(
                "kernel {}: it was made ready before with other bindings or parameters",
                desc.name
            )));
        }
        Ok(Lease::map(loaded, |l| &l.pipeline))
    }

    /// Ends the pipelines without a lease whose last launch is over. If there are none, the call is
    /// one load. May block on the driver.
    pub fn collect(&self) {
        self.loader.ended.drain(
            |ended| ended.after.iter().all(|point| point.has_passed()),
            |ended| self.loader.end(ended.loaded),
        );
    }

    /// Ends the pipelines without a lease whose last launch is over, and forgets the keys of such
    /// pipelines. Returns the number of pipelines that still wait for a launch. May block on the
    /// driver.
    pub fn trim(&self) -> usize {
        self.collect();
        self.manager.trim(0);
        self.ended()
    }

    /// The number of pipelines without a lease that wait for the end of launches, or for the next
    /// [`collect`](Self::collect).
    #[must_use]
    pub fn ended(&self) -> usize {
        self.loader.ended.len()
    }

    /// The number of pipelines with a holder (a snapshot).
    pub fn in_use(&self) -> u64 {
        self.manager.in_use()
    }

    /// The pool's statistics.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }

    /// Shuts the pool down. The device must have no pending work.
    ///
    /// # Errors
    /// `LeasesOutstanding`. After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        self.manager.shutdown()?;
        self.loader.ended.take_all().into_iter().for_each(|ended| self.loader.end(ended.loaded));
        Ok(())
    }
}

impl<L: PipelineLoader> fmt::Debug for PipelinePool<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PipelinePool").field(&self.manager.stats()).finish()
    }
}
