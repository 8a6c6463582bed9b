//! A pool and a manager against naive models without lists, cells or words: only the content of
//! each lease.

use crate::support::*;
use leasehold_core::*;
use proptest::prelude::*;
use std::collections::HashMap;

#[derive(Debug, Clone)]
enum Step {
    Acquire(u64),
    AcquireUnique(u64),
    AcquireFailing,
    Clone(usize),
    ByHandle(usize),
    OldHandle(usize),
    Drop(usize),
    TryUnique(usize),
    Share(usize),
    Downgrade(usize),
    Upgrade(usize),
    DropWeak(usize),
    Claim(usize),
    Unclaim(usize),
    Map(usize),
    Trim(u64),
    Shutdown,
    DestroyAtOnce(bool),
}

fn step() -> impl Strategy<Value = Step> {
    let i = || 0usize..64;
    prop_oneof![
        4 => (0u64..4).prop_map(Step::Acquire),
        2 => (0u64..4).prop_map(Step::AcquireUnique),
        1 => Just(Step::AcquireFailing),
        3 => i().prop_map(Step::Clone),
        2 => i().prop_map(Step::ByHandle),
        2 => i().prop_map(Step::OldHandle),
        8 => i().prop_map(Step::Drop),
        2 => i().prop_map(Step::TryUnique),
        2 => i().prop_map(Step::Share),
        2 => i().prop_map(Step::Downgrade),
        2 => i().prop_map(Step::Upgrade),
        2 => i().prop_map(Step::DropWeak),
        2 => i().prop_map(Step::Claim),
        2 => i().prop_map(Step::Unclaim),
        1 => i().prop_map(Step::Map),
        1 => (0u64..3).prop_map(Step::Trim),
        1 => Just(Step::Shutdown),
        1 => any::<bool>().prop_map(Step::DestroyAtOnce),
    ]
}

const GENERATIONS: u32 = 7;
const MAX: u64 = 6;

enum Held {
    Shared(Lease<Item>),
    Unique(UniqueLease<Item>),
    Claimed(Claim<Item>),
    Mapped(Lease<u64>),
}

/// The model's record of a held resource.
#[derive(Debug, Default, Clone)]
struct Life {
    number: u64,
    holds: usize,
    unique: bool,
    claimed: bool,
    mapped: bool,
}

#[derive(Default)]
struct Model {
    lives: HashMap<BufferHandle, Life>,
    /// Number and size of idle resources.
    idle: Vec<(u64, u64)>,
    created: u64,
    recycled: u64,
    peak: u64,
    /// Ended uses of each slot, failed creations included.
    uses: HashMap<u32, u32>,
    destroy_at_once: bool,
    down: bool,
}

impl Model {
    fn exists(&self) -> u64 {
        (self.lives.len() + self.idle.len()) as u64
    }

    /// Records the use of a slot, also for a failed creation. Returns whether the slot is worn out
    /// now.
    fn use_slot(&mut self, handle: BufferHandle) -> bool {
        let uses = self.uses.entry(handle.index()).or_default();
        *uses += 1;
        let worn = *uses == GENERATIONS;
        assert!(*uses <= GENERATIONS, "a retired slot was used");
        worn
    }

    fn begin(&mut self, handle: BufferHandle, item: &Item, want: u64, unique: bool) {
        assert!(item.size >= want);
        if let Some(at) = self.idle.iter().position(|&(number, _)| number == item.number) {
            self.idle.swap_remove(at);
            self.recycled += 1;
        } else {
            assert_eq!(item.number, self.created, "a new one");
            assert!(
                self.idle.iter().all(|&(_, size)| size < want),
                "an idle one would have served"
            );
            self.created += 1;
        }
        let life = Life { number: item.number, holds: 1, unique, ..Life::default() };
        assert!(self.lives.insert(handle, life).is_none(), "two lives of one handle");
    }

    fn end(&mut self, handle: BufferHandle, size: u64) {
        let life = self.lives.get_mut(&handle).expect("it was alive");
        life.holds -= 1;
        if life.holds > 0 {
            return;
        }
        let life = self.lives.remove(&handle).unwrap();
        if !self.use_slot(handle) && !self.destroy_at_once {
            self.idle.push((life.number, size));
        }
    }
}

fn run(steps: &[Step], config: PoolConfig) {
    let config =
        PoolConfig { block: 1, generations: GENERATIONS, max_live: Some(MAX as u32), ..config };
    let (pool, log) = pool(config);
    let mut model = Model::default();
    let mut held: Vec<(BufferHandle, u64, Held)> = Vec::new();
    let mut weak: Vec<(BufferHandle, WeakLease<Item>)> = Vec::new();
    let mut ever: Vec<BufferHandle> = Vec::new();
    for step in steps {
        let pick = |i: &usize, len: usize| (len > 0).then(|| i % len);
        match step {
            Step::Acquire(size) | Step::AcquireUnique(size) => {
                let unique = matches!(step, Step::AcquireUnique(_));
                let got = if unique {
                    pool.acquire_unique(&want(*size)).map(|l| (l.handle(), Held::Unique(l)))
                } else {
                    pool.acquire(&want(*size)).map(|l| (l.handle(), Held::Shared(l)))
                };
                match got {
                    Ok((handle, lease)) => {
                        assert!(!model.down && !ever.contains(&handle));
                        let item: &Item = match &lease {
                            Held::Unique(l) => l,
                            Held::Shared(l) => l,
                            _ => unreachable!(),
                        };
                        model.begin(handle, item, *size, unique);
                        let size = item.size;
                        held.push((handle, size, lease));
                        ever.push(handle);
                    }
                    Err(Error::InvalidState(_)) => assert!(model.down),
                    Err(Error::OverBudget { .. }) => {
                        assert!(!model.down);
                        assert_eq!((model.lives.len() as u64, model.idle.len()), (MAX, 0));
                    }
                    Err(e) => panic!("{e}"),
                }
            }
            Step::AcquireFailing => {
                log.set(|l| &l.fail_create, true);
                let told = sync::Mutex::new(None);
                let tell = |handle: BufferHandle| *told.lock() = Some(handle);
                assert!(pool.acquire_new(&Want { during: Some(&tell), ..want(1) }).is_err());
                if let Some(handle) = told.into_inner() {
                    model.use_slot(handle);
                    ever.push(handle);
                }
                log.set(|l| &l.fail_create, false);
            }
            Step::Clone(i) => {
                if let Some(i) = pick(i, held.len())
                    && let (handle, size, Held::Shared(lease)) = &held[i]
                {
                    let new = (*handle, *size, Held::Shared(lease.clone()));
                    model.lives.get_mut(handle).unwrap().holds += 1;
                    held.push(new);
                }
            }
            Step::ByHandle(i) => {
                if let Some(i) = pick(i, held.len()) {
                    let (handle, size) = (held[i].0, held[i].1);
                    let life = model.lives.get_mut(&handle).unwrap();
                    match pool.lease(handle) {
                        Ok(lease) => {
                            assert!(!life.unique);
                            assert_eq!(lease.number, life.number);
                            life.holds += 1;
                            held.push((handle, size, Held::Shared(lease)));
                        }
                        Err(e) => assert!(life.unique && e.kind() == "Occupied"),
                    }
                }
            }
            Step::OldHandle(i) => {
                if let Some(i) = pick(i, ever.len()) {
                    let alive = model.lives.get(&ever[i]);
                    assert_eq!(pool.is_alive(ever[i]), alive.is_some());
                    let expected =
                        alive.map_or("StaleHandle", |l| if l.unique { "Occupied" } else { "Ok" });
                    assert_eq!(kind(pool.lease(ever[i])), expected);
                }
            }
            Step::Drop(i) => {
                if let Some(i) = pick(i, held.len()) {
                    let (handle, size, lease) = held.swap_remove(i);
                    if let Held::Claimed(_) = lease {
                        model.lives.get_mut(&handle).unwrap().claimed = false;
                    }
                    drop(lease);
                    model.end(handle, size);
                }
            }
            Step::TryUnique(i) => {
                if let Some(i) = pick(i, held.len()) {
                    let (handle, size, lease) = held.swap_remove(i);
                    let life = model.lives.get_mut(&handle).unwrap();
                    let lease = match lease {
                        Held::Shared(lease) => match lease.try_unique() {
                            Ok(unique) => {
                                assert!(life.holds == 1 && !life.claimed && !life.mapped);
                                life.unique = true;
                                Held::Unique(unique)
                            }
                            Err(lease) => {
                                assert!(life.holds > 1 || life.claimed || life.mapped);
                                Held::Shared(lease)
                            }
                        },
                        Held::Mapped(lease) => {
                            Held::Mapped(lease.try_unique().expect_err("mapped"))
                        }
                        other => other,
                    };
                    held.push((handle, size, lease));
                }
            }
            Step::Share(i) => {
                if let Some(i) = pick(i, held.len())
                    && let Held::Unique(_) = held[i].2
                {
                    let (handle, size, Held::Unique(unique)) = held.swap_remove(i) else {
                        unreachable!()
                    };
                    model.lives.get_mut(&handle).unwrap().unique = false;
                    held.push((handle, size, Held::Shared(unique.share())));
                }
            }
            Step::Downgrade(i) => {
                if let Some(i) = pick(i, held.len())
                    && let (handle, _, Held::Shared(lease)) = &held[i]
                {
                    weak.push((*handle, lease.downgrade()));
                }
            }
            Step::Upgrade(i) => {
                if let Some(i) = pick(i, weak.len()) {
                    let (handle, weak) = &weak[i];
                    match (weak.try_upgrade(), model.lives.get_mut(handle)) {
                        (Ok(lease), Some(life)) => {
                            assert!(!life.unique && lease.number == life.number);
                            life.holds += 1;
                            held.push((*handle, lease.size, Held::Shared(lease)));
                        }
                        (Err(e), Some(life)) => assert!(life.unique && e.kind() == "Occupied"),
                        (upgraded, None) => assert_eq!(kind(upgraded), "StaleHandle"),
                    }
                }
            }
            Step::DropWeak(i) => {
                if let Some(i) = pick(i, weak.len()) {
                    weak.swap_remove(i);
                }
            }
            Step::Claim(i) => {
                if let Some(i) = pick(i, held.len())
                    && let (handle, size, Held::Shared(lease)) = &held[i]
                {
                    let (handle, size) = (*handle, *size);
                    let life = model.lives.get_mut(&handle).unwrap();
                    match lease.claim() {
                        Ok(claim) => {
                            assert!(!life.claimed);
                            life.claimed = true;
                            life.holds += 1;
                            held.push((handle, size, Held::Claimed(claim)));
                        }
                        Err(e) => assert!(life.claimed && e.kind() == "Occupied"),
                    }
                }
            }
            Step::Unclaim(i) => {
                if let Some(i) = pick(i, held.len())
                    && let Held::Claimed(_) = held[i].2
                {
                    let (handle, size, claim) = held.swap_remove(i);
                    drop(claim);
                    model.lives.get_mut(&handle).unwrap().claimed = false;
                    model.end(handle, size);
                }
            }
            Step::Map(i) => {
                if let Some(i) = pick(i, held.len())
                    && let Held::Shared(_) = held[i].2
                {
                    let (handle, size, Held::Shared(lease)) = held.swap_remove(i) else {
                        unreachable!()
                    };
                    model.lives.get_mut(&handle).unwrap().mapped = true;
                    held.push((handle, size, Held::Mapped(Lease::map(lease, |item| &item.size))));
                }
            }
            Step::Trim(keep) => {
                let destroyed = pool.trim(*keep);
                assert_eq!(destroyed, (model.idle.len() as u64).saturating_sub(*keep));
            }
            Step::Shutdown => match pool.shutdown() {
                Ok(()) => {
                    assert!(model.down || (held.is_empty() && weak.is_empty()));
                    model.down = true;
                    model.idle.clear();
                }
                Err(Error::LeasesOutstanding { strong, weak: w, .. }) => {
                    assert_eq!((strong, w), (model.lives.len() as u64, weak.len() as u64));
                    assert!(strong + w > 0);
                }
                Err(e) => panic!("{e}"),
            },
            Step::DestroyAtOnce(on) => {
                log.set(|l| &l.destroy_at_once, *on);
                model.destroy_at_once = *on;
            }
        }
        // The pool chooses which idle resources are destroyed for room or by a trim; the payloads
        // report their own drops.
        let gone = std::mem::take(&mut *log.gone.lock());
        model.idle.retain(|(number, _)| !gone.contains(number));
        model.peak = model.peak.max(model.exists());
        let stats = pool.stats();
        assert_eq!(stats.live, model.lives.len() as u64);
        assert_eq!(stats.idle, model.idle.len() as u64);
        assert_eq!((stats.created, stats.recycled), (model.created, model.recycled));
        assert_eq!(stats.weak, weak.len() as u64);
        assert_eq!(log.alive(), model.exists());
        assert!(stats.peak == model.peak && stats.peak <= MAX);
        assert_eq!(
            stats.retired,
            model.uses.values().filter(|&&uses| uses == GENERATIONS).count() as u64
        );
    }
    drop(pool);
    assert_eq!(log.alive(), model.lives.len() as u64, "only what is held outlives the pool");
    for (handle, _, lease) in &held {
        let number = match lease {
            Held::Shared(l) => l.number,
            Held::Unique(l) => l.number,
            Held::Claimed(l) => l.number,
            Held::Mapped(_) => continue,
        };
        assert_eq!(number, model.lives[handle].number);
    }
    held.clear();
    assert_eq!(log.alive(), 0);
    assert!(weak.iter().all(|(_, w)| w.upgrade().is_none()));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_pool_is_what_its_model_is(steps in proptest::collection::vec(step(), 0..120), thread_cells: bool) {
        run(&steps, PoolConfig { thread_cells, ..config() });
    }

    #[test]
    fn a_manager_is_what_its_model_is(steps in proptest::collection::vec(keyed_step(), 0..120)) {
        run_keyed(&steps);
    }
}

#[derive(Debug, Clone)]
enum KeyedStep {
    GetOrCreate(u32),
    GetOrCreateFailing(u32),
    Get(u32),
    Drop(usize),
    Unique(usize),
    Release(u32),
    Trim,
    Shutdown,
}

fn keyed_step() -> impl Strategy<Value = KeyedStep> {
    let key = || 0u32..4;
    let i = || 0usize..16;
    prop_oneof![
        4 => key().prop_map(KeyedStep::GetOrCreate),
        1 => key().prop_map(KeyedStep::GetOrCreateFailing),
        2 => key().prop_map(KeyedStep::Get),
        6 => i().prop_map(KeyedStep::Drop),
        1 => i().prop_map(KeyedStep::Unique),
        3 => key().prop_map(KeyedStep::Release),
        1 => Just(KeyedStep::Trim),
        1 => Just(KeyedStep::Shutdown),
    ]
}

/// The model's record of a key: the resource and its holders.
struct Keyed {
    number: u64,
    handle: BufferHandle,
    managers: bool,
    holds: usize,
    unique: bool,
}

enum KeyedHold {
    Shared(Lease<Item>),
    Unique(UniqueLease<Item>),
}

fn run_keyed(steps: &[KeyedStep]) {
    let (manager, log) = manager(config());
    let mut keys: HashMap<u32, Keyed> = HashMap::new();
    let mut held: Vec<(u32, KeyedHold)> = Vec::new();
    let mut down = false;
    for step in steps {
        match step {
            KeyedStep::GetOrCreate(key) | KeyedStep::GetOrCreateFailing(key) => {
                let failing = matches!(step, KeyedStep::GetOrCreateFailing(_));
                let next = log.counts().0;
                log.set(|l| &l.fail_create, failing);
                let got = manager.get_or_create(key, &want(1));
                log.set(|l| &l.fail_create, false);
                match (got, keys.get_mut(key)) {
                    (Err(e), None) => {
                        assert!(if failing && !down { e.kind() == "Unavailable" } else { down })
                    }
                    (Err(e), Some(known)) => assert!(known.unique && e.kind() == "Occupied"),
                    (Ok(lease), Some(known)) => {
                        assert!(!known.unique);
                        assert_eq!(lease.number, known.number);
                        known.managers = true;
                        known.holds += 1;
                        held.push((*key, KeyedHold::Shared(lease)));
                    }
                    (Ok(lease), None) => {
                        assert!(!failing && !down);
                        assert_eq!(lease.number, next, "always a new one");
                        let (number, handle) = (next, lease.handle());
                        keys.insert(
                            *key,
                            Keyed { number, handle, managers: true, holds: 1, unique: false },
                        );
                        held.push((*key, KeyedHold::Shared(lease)));
                    }
                }
            }
            KeyedStep::Get(key) => {
                let got = manager.get(key).map(|l| l.number);
                assert_eq!(got, keys.get(key).filter(|k| !k.unique).map(|k| k.number));
            }
            KeyedStep::Drop(i) if !held.is_empty() => {
                let (key, lease) = held.swap_remove(i % held.len());
                drop(lease);
                let known = keys.get_mut(&key).unwrap();
                known.holds -= 1;
                known.unique = false;
                if known.holds == 0 && !known.managers {
                    keys.remove(&key);
                }
            }
            KeyedStep::Unique(i) if !held.is_empty() => {
                let i = i % held.len();
                if let (key, KeyedHold::Shared(_)) = &held[i] {
                    let known = keys.get_mut(key).unwrap();
                    let (key, KeyedHold::Shared(lease)) = held.swap_remove(i) else {
                        unreachable!()
                    };
                    let lease = match lease.try_unique() {
                        Ok(unique) => {
                            assert!(known.holds == 1 && !known.managers);
                            known.unique = true;
                            KeyedHold::Unique(unique)
                        }
                        Err(lease) => {
                            assert!(known.holds > 1 || known.managers);
                            KeyedHold::Shared(lease)
                        }
                    };
                    held.push((key, lease));
                }
            }
            KeyedStep::Drop(_) | KeyedStep::Unique(_) => {}
            KeyedStep::Release(key) => {
                if let Some(known) = keys.get_mut(key) {
                    let released = manager.release(known.handle);
                    assert_eq!(kind(released), if known.managers { "Ok" } else { "StaleHandle" });
                    known.managers = false;
                    if known.holds == 0 {
                        keys.remove(key);
                    }
                }
            }
            KeyedStep::Trim => drop(manager.trim(0)),
            KeyedStep::Shutdown => match manager.shutdown() {
                Ok(()) => {
                    assert!(held.is_empty());
                    keys.clear();
                    down = true;
                    assert_eq!(log.alive(), 0);
                }
                Err(e) => {
                    let strong = keys.values().filter(|k| k.holds > 0).count() as u64;
                    assert!(
                        matches!(e, Error::LeasesOutstanding { strong: s, weak: 0, .. } if s == strong),
                        "{e}"
                    );
                    assert!(strong > 0);
                }
            },
        }
        for (key, known) in &keys {
            let own = held.iter().filter(|(k, _)| k == key);
            for (_, lease) in own {
                let number = match lease {
                    KeyedHold::Shared(l) => l.number,
                    KeyedHold::Unique(l) => l.number,
                };
                assert_eq!(number, known.number);
            }
            assert!(manager.is_alive(known.handle));
        }
        assert_eq!(manager.stats().live, keys.len() as u64);
    }
}
