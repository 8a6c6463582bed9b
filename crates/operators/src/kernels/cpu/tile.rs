//! What a kernel is to the CPU backend: a function over one tile of a grid, its operands and its parameters.
//!
//! A kernel's grid is a function of its parameters alone, and each output element is computed wholly in one tile, in one order.
//! So a result is the same to the bit for any number of threads, for eager and replayed execution. A kernel allocates nothing;
//! its scratch is on the stack (at most [`STACK_BYTES`]).
//!
//! [`KernelSpec::plan`] refuses parameters that describe nothing, and says what a launch needs; [`KernelSpec::check_bound`] refuses operands
//! that have less. The library makes both the check of each kernel, which the runtime asks before every launch. So a tile itself checks
//! only what comes from device memory (positions, token ids).
//!
//! This module must not know any particular kernel, nor the runtime above the traits.

use std::borrow::Cow;
use std::marker::PhantomData;

use bytemuck::Pod;
use leasehold_hal::kernel::{Access, Binding, CpuArgs, CpuFn, LaunchInfo};

use super::elem::DType;
use super::isa::Isa;
#[cfg(target_arch = "aarch64")]
use super::simd::Neon;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::simd::{Generic, Simd, Task};

/// The most operands that a kernel has.
pub const MAX_OPERANDS: usize = 12;
/// The most stack that a tile takes, in bytes; a worker's stack must have it.
pub const STACK_BYTES: usize = 160 << 10;

/// An operand in a kernel's signature.
#[derive(Debug, Clone, Copy)]
pub struct Operand {
    /// What error messages call it.
    pub name: &'static str,
    /// How the kernel uses it.
    pub access: Access,
}

/// An operand that is read.
pub(crate) const fn read(name: &'static str) -> Operand {
    Operand { name, access: Access::Read }
}

/// An operand that is written.
pub(crate) const fn write(name: &'static str) -> Operand {
    Operand { name, access: Access::Write }
}

/// An operand that is read and written.
pub(crate) const fn update(name: &'static str) -> Operand {
    Operand { name, access: Access::ReadWrite }
}

/// The address of operand `i` as a pointer.
#[inline(always)]
pub(crate) fn ptr<T>(args: &CpuArgs<'_>, i: usize) -> *mut T {
    std::ptr::with_exposed_provenance_mut(args.bindings()[i].addr as usize)
}

/// No memory: what is bound for an operand that the parameters leave out.
pub const NONE: Binding = Binding { addr: 0, len: 0, native: 0, access: Access::Read };

/// The memory of a slice as a binding, for launches without a runtime ([`KernelSpec::run`]). It borrows nothing.
#[must_use]
pub fn bind<T>(slice: &mut [T]) -> Binding {
    let addr = slice.as_mut_ptr().expose_provenance() as u64;
    Binding { addr, len: size_of_val(slice) as u64, native: 0, access: Access::ReadWrite }
}

/// The memory of a slice that is only read as a binding, likewise.
#[must_use]
pub fn bind_read<T>(slice: &[T]) -> Binding {
    let addr = slice.as_ptr().expose_provenance() as u64;
    Binding { addr, len: size_of_val(slice) as u64, native: 0, access: Access::Read }
}

/// Why a launch is refused.
pub type Refusal = Cow<'static, str>;

/// What an operand takes: elements, and bytes of one.
pub(crate) type Extent = (usize, usize);

/// What a launch with given parameters needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Tiles in x, y and z.
    pub grid: [u32; 3],
    /// Bytes that each operand must have at least, in the order of the signature; 0 for one that these parameters leave out,
    /// which is bound as an empty range.
    pub bytes: [u64; MAX_OPERANDS],
    /// Alignment that each operand must have, likewise; 0 and 1 ask nothing.
    pub align: [u8; MAX_OPERANDS],
    /// Operands that may be the very same memory as the last one, a bit for each: then an element is read and written in one place.
    pub in_place: u16,
}

impl Launch {
    /// A launch of `grid` tiles whose operands take so many elements of so many bytes.
    pub(crate) fn new(grid: [usize; 3], operands: &[Extent]) -> Result<Self, Refusal> {
        let mut launch = Self { grid: [0; 3], bytes: [0; MAX_OPERANDS], align: [1; MAX_OPERANDS], in_place: 0 };
        for (to, from) in launch.grid.iter_mut().zip(grid) {
            *to = u32::try_from(from).map_err(|_| Refusal::from("more than 2^32 tiles"))?;
        }
        for (i, &(count, bytes)) in operands.iter().enumerate() {
            launch.bytes[i] = (count as u64).checked_mul(bytes as u64).ok_or("an operand of more than 2^64 bytes")?;
            launch.align[i] = bytes as u8;
        }
        Ok(launch)
    }

    /// The same, where operand `i` may be the last one if `alike` says that both are laid out alike.
    pub(crate) fn or_in_place(mut self, i: usize, alike: bool) -> Self {
        self.in_place |= u16::from(alike) << i;
        self
    }
}

/// `a · b` elements.
pub(crate) fn times(a: usize, b: usize) -> Result<usize, Refusal> {
    a.checked_mul(b).ok_or_else(|| "an operand of more than 2^64 elements".into())
}

/// Parameters of a kernel: plain words, with what kernels in other languages must declare alike.
pub trait Params: Pod {
    /// The type's name.
    const NAME: &'static str;
    /// The fields in order, each as it is declared: `n: [u32; 3]`. Kernels in other languages declare the same.
    const FIELDS: &'static [&'static str];

    /// The bytes that a launch carries.
    fn as_bytes(&self) -> &[u8] {
        bytemuck::bytes_of(self)
    }

    /// The parameters that `bytes` carry; `None` if there are more or fewer than there should be.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytemuck::try_pod_read_unaligned(bytes).ok()
    }
}

/// Declares a structure of 32-bit words.
macro_rules! params {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$fmeta:meta])* pub $field:ident: $ty:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Default, bytemuck::Pod, bytemuck::Zeroable)]
        #[repr(C)]
        pub struct $name { $($(#[$fmeta])* pub $field: $ty,)* }
        impl $crate::kernels::cpu::tile::Params for $name {
            const NAME: &'static str = stringify!($name);
            const FIELDS: &'static [&'static str] = &[$(concat!(stringify!($field), ": ", stringify!($ty))),*];
        }
    };
}
pub(crate) use params;

/// A kernel's source.
pub trait Kernel: 'static {
    /// The name that it is registered under.
    const NAME: &'static str;
    /// Its signature.
    const OPERANDS: &'static [Operand];
    /// Its parameters.
    type Params: Params;
    /// Whether its last operand may be one of the others, where [`Launch::in_place`] has it.
    const IN_PLACE: bool = false;

    /// Checks the parameters and says what a launch needs.
    ///
    /// # Errors
    /// The reason, where the parameters describe nothing that the kernel computes.
    fn plan(p: &Self::Params) -> Result<Launch, Refusal>;

    /// Computes a tile. `#[inline(always)]`, like all that it calls.
    ///
    /// # Safety
    /// - `plan(p)` is `Ok`, and `t` is a tile of its grid.
    /// - The operands have the bytes and the alignment that it asks for and are accessible as the signature says; one that is written
    ///   overlaps no other but as `plan(p)` allows; nobody else writes what the tile reads or touches what it writes.
    unsafe fn tile<S: Simd>(s: S, p: &Self::Params, t: &CpuArgs<'_>);
}

/// A kernel as a registry lists it.
#[derive(Debug, Clone, Copy)]
pub struct KernelSpec {
    /// The name.
    pub name: &'static str,
    /// The signature.
    pub operands: &'static [Operand],
    /// Bytes of the parameters.
    pub params_bytes: usize,
    /// Whether the last operand may be one of the others.
    pub in_place: bool,
    /// The levels that the binary has it for, the most specific first.
    pub variants: &'static [(Isa, CpuFn)],
    plan: fn(&[u8]) -> Result<Launch, Refusal>,
}

impl KernelSpec {
    /// The kernel called `name`.
    #[must_use]
    pub fn find(name: &str) -> Option<&'static Self> {
        super::KERNELS.iter().find(|spec| spec.name == name)
    }

    /// The entry of kernel `K`.
    #[must_use]
    pub const fn of<K: Kernel>() -> Self {
        assert!(K::OPERANDS.len() <= MAX_OPERANDS && size_of::<K::Params>() <= 4096);
        Self {
            name: K::NAME,
            operands: K::OPERANDS,
            params_bytes: size_of::<K::Params>(),
            in_place: K::IN_PLACE,
            variants: Variants::<K>::ALL,
            plan: plan::<K>,
        }
    }

    /// What a launch with these parameters needs.
    ///
    /// # Errors
    /// The reason, where the size or the contents of the parameters are wrong.
    pub fn plan(&self, params: &[u8]) -> Result<Launch, Refusal> {
        (self.plan)(params)
    }

    /// Whether `bindings` satisfy a launch: their number, sizes, alignment and overlap.
    ///
    /// # Errors
    /// The reason, naming the kernel and the operand.
    pub fn check(&self, launch: &Launch, bindings: &[Binding]) -> Result<(), Refusal> {
        self.check_bound(launch, &LaunchInfo::new((launch.grid, [1; 3], 0), &[], bindings))
    }

    /// As [`check`](Self::check), of what a launch binds.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn check_bound(&self, launch: &Launch, bound: &LaunchInfo<'_>) -> Result<(), Refusal> {
        if bound.bindings() != self.operands.len() {
            return Err(self.wrong_count(bound.bindings()));
        }
        let last = self.operands.len() - 1;
        for (i, operand) in self.operands.iter().enumerate() {
            let aligned = launch.bytes[i] == 0 || bound.is_aligned(i, launch.align[i].into());
            if bound.len(i) < launch.bytes[i] || !aligned {
                return Err(self.wrong_operand(operand, launch.bytes[i], launch.align[i], bound.len(i)));
            }
            for (j, other) in self.operands[..i].iter().enumerate() {
                let written = operand.access.writes() || other.access.writes();
                let in_place = i == last && launch.in_place >> j & 1 == 1 && bound.same(i, j);
                if written && bound.overlap(i, j) && !in_place {
                    return Err(self.overlapping(other, operand));
                }
            }
        }
        Ok(())
    }

    /// The variant of level `isa`, or of the most specific one that this machine runs.
    #[must_use]
    pub fn resolve(&self, isa: Option<Isa>) -> Option<(Isa, CpuFn)> {
        self.variants.iter().copied().find(|(level, _)| isa.is_none_or(|isa| isa == *level) && level.available())
    }

    /// Runs a whole launch on the calling thread, tile after tile: what any order on any threads gives, to the bit. `isa` forces a
    /// level.
    ///
    /// # Safety
    /// - The bindings' ranges are valid, and used by nobody else in a way that the signature excludes, during the call.
    ///
    /// # Errors
    /// As [`plan`](Self::plan) and [`check`](Self::check); and where the level is not available.
    pub unsafe fn run(&self, isa: Option<Isa>, params: &[u8], bindings: &[Binding]) -> Result<(), Refusal> {
        let launch = self.plan(params)?;
        self.check(&launch, bindings)?;
        let (_, tile) = self.resolve(isa).ok_or("this machine does not run that level")?;
        let [nx, ny, nz] = launch.grid;
        // SAFETY: the caller vouches for the ranges; there is no scratch memory.
        let mut args = unsafe { CpuArgs::new((launch.grid, [1; 3]), bindings, params, (std::ptr::null_mut(), 0)) };
        for z in 0..nz {
            for y in 0..ny {
                for x in 0..nx {
                    args.set_tile([x, y, z]);
                    // SAFETY: parameters, lengths and overlap were checked above, and the caller vouches for the ranges.
                    unsafe { tile(&args) }
                }
            }
        }
        Ok(())
    }

    #[cold]
    fn wrong_count(&self, found: usize) -> Refusal {
        format!("kernel {} takes {} operands, {found} are bound", self.name, self.operands.len()).into()
    }

    #[cold]
    fn wrong_operand(&self, operand: &Operand, bytes: u64, align: u8, bound: u64) -> Refusal {
        format!(
            "operand {} of kernel {} needs {bytes} bytes aligned to {align}; {bound} bytes are bound",
            operand.name, self.name
        )
        .into()
    }

    #[cold]
    fn overlapping(&self, a: &Operand, b: &Operand) -> Refusal {
        format!("operands {} and {} of kernel {} overlap", a.name, b.name, self.name).into()
    }
}

fn plan<K: Kernel>(params: &[u8]) -> Result<Launch, Refusal> {
    let params = K::Params::from_bytes(params).ok_or_else(|| -> Refusal {
        format!("kernel {} takes {} bytes of parameters, not {}", K::NAME, size_of::<K::Params>(), params.len()).into()
    })?;
    K::plan(&params).map_err(|why| format!("kernel {}: {why}", K::NAME).into())
}

/// The levels that kernel `K` is compiled for.
struct Variants<K>(PhantomData<K>);

impl<K: Kernel> Variants<K> {
    #[cfg(target_arch = "x86_64")]
    const ALL: &'static [(Isa, CpuFn)] =
        &[(Isa::Avx512, entry::<K, Avx512>), (Isa::Avx2, entry::<K, Avx2>), (Isa::Generic, entry::<K, Generic>)];
    #[cfg(target_arch = "aarch64")]
    const ALL: &'static [(Isa, CpuFn)] = &[(Isa::Neon, entry::<K, Neon>), (Isa::Generic, entry::<K, Generic>)];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    const ALL: &'static [(Isa, CpuFn)] = &[(Isa::Generic, entry::<K, Generic>)];
}

/// One tile of `K`, as work for a level.
struct OneTile<'a, K: Kernel>(&'a CpuArgs<'a>, PhantomData<K>);

impl<K: Kernel> Task for OneTile<'_, K> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // Of the right size: `plan` has read them. Were they not, the tile would do nothing.
        if let Some(params) = K::Params::from_bytes(self.0.params_bytes()) {
            // SAFETY: `entry`'s caller vouches for the launch and the tile.
            unsafe { K::tile(s, &params, self.0) }
        }
    }
}

/// The tile function of kernel `K` at level `S`.
///
/// # Safety
/// - The bullets of [`Kernel::tile`]; the machine runs the level.
unsafe fn entry<K: Kernel, S: Simd>(tile: &CpuArgs<'_>) {
    // SAFETY: the caller vouches for the level.
    let s = unsafe { S::assume() };
    s.run(OneTile::<K>(tile, PhantomData));
}

/// The element type of a parameter word.
///
/// # Errors
/// Where the word names none.
pub(crate) fn dtype(what: &str, raw: u32) -> Result<DType, Refusal> {
    DType::from_raw(raw).ok_or_else(|| format!("{raw} is no element type of {what}").into())
}

/// The element type of a word that `plan` has accepted.
#[inline(always)]
pub(crate) fn accepted(raw: u32) -> DType {
    DType::from_raw(raw).unwrap_or(DType::F16)
}

/// Refuses a parameter that has to be positive.
pub(crate) fn positive(what: &'static str, value: u32) -> Result<usize, Refusal> {
    if value == 0 { Err(format!("{what} is zero").into()) } else { Ok(value as usize) }
}
