//! Operations as ranges of independent tiles: kernels, copies, fills.
//!
//! This module must not know which threads run the tiles, or in which order.

use super::pool::{TilePool, with_scratch};
use leasehold_hal::{Copies, CpuArgs, CpuCFn, CpuFn, CpuTile, Dispatch, Op};

/// Bytes of a tile of a copy or fill: large enough to be worth a claim, small enough to spread.
const PIECE: u64 = 256 << 10;
/// The approximate bytes that a copy moves in a nanosecond on one thread. The figure only decides
/// where the copy runs.
const BYTES_PER_NANO: u64 = 8;

/// A data-parallel operation.
pub(crate) enum Work<'a> {
    Kernel(Tiles<'a>),
    Copy(Rows),
    Fill(Pattern),
}

/// The bit of a pipeline's word that says that the rest is the address of a function of C. No
/// function of a program lies where the bit belongs to the address.
pub(crate) const C_FUNCTION: usize = 1 << (usize::BITS - 1);

/// The function of a kernel.
#[derive(Clone, Copy)]
enum Entry {
    Rust(CpuFn),
    C(CpuCFn),
}

impl Entry {
    /// # Safety
    /// - `native` is the word of a pipeline of this backend.
    #[inline]
    unsafe fn of(native: u64) -> Self {
        let word = native as usize;
        if word & C_FUNCTION == 0 {
            // SAFETY: the manager made the word from a `CpuFn`.
            Self::Rust(unsafe { std::mem::transmute::<usize, CpuFn>(word) })
        } else {
            // SAFETY: the manager made the word from a `CpuCFn` and the bit.
            Self::C(unsafe { std::mem::transmute::<usize, CpuCFn>(word & !C_FUNCTION) })
        }
    }

    /// # Safety
    /// - As a [`CpuFn`].
    #[inline]
    unsafe fn call(self, args: &CpuArgs<'_>) {
        // SAFETY: by the contract; the struct for C lives until the call returns.
        unsafe {
            match self {
                Self::Rust(function) => function(args),
                Self::C(function) => function(&CpuTile::of(args)),
            }
        }
    }
}

/// The tiles of a dispatch.
pub(crate) struct Tiles<'a> {
    run: Entry,
    native: u64,
    count: u64,
    dispatch: Dispatch<'a>,
}

/// Rows of a copy. A copy without gaps is one long row.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    src: u64,
    src_pitch: u64,
    dst: u64,
    dst_pitch: u64,
    width: u64,
    rows: u64,
    /// The number of pieces of a row; 0 if a piece is several rows.
    pieces: u64,
    rows_per_piece: u64,
}

/// A fill.
#[derive(Clone, Copy)]
pub(crate) struct Pattern {
    dst: u64,
    bytes: u64,
    /// The pattern, repeated to eight bytes.
    word: u64,
}

impl<'a> Work<'a> {
    /// The operation as work; `None` for an operation that is not data-parallel.
    ///
    /// # Safety
    /// - A dispatch's pipeline is of this backend.
    #[inline]
    pub(crate) unsafe fn of(op: &Op<'a>) -> Option<Self> {
        Some(match *op {
            // SAFETY: the pipeline is of this backend (the contract of this function).
            Op::Dispatch(d) => Work::Kernel(unsafe { Tiles::new(d) }),
            Op::Copy(c) => {
                Work::Copy(Rows::new(c.src, c.src_pitch, c.dst, c.dst_pitch, c.width, c.rows))
            }
            Op::Upload(u) => Work::Copy(Rows::new(u.src as u64, 0, u.dst, 0, u.bytes, 1)),
            Op::Download(d) => Work::Copy(Rows::new(d.src, 0, d.dst as u64, 0, d.bytes, 1)),
            Op::Fill(f) => Work::Fill(Pattern::new(f.dst, f.bytes, f.pattern, f.width)),
            _ => return None,
        })
    }

    /// The number of tiles.
    #[inline]
    pub(crate) fn tiles(&self) -> u64 {
        match self {
            Work::Kernel(t) => t.count,
            Work::Copy(r) => r.tiles(),
            Work::Fill(p) => p.bytes.div_ceil(PIECE),
        }
    }

    /// Nanoseconds that all tiles take on one thread; 0 if unknown.
    pub(crate) fn nanos(&self, pool: &TilePool) -> u64 {
        match self {
            Work::Kernel(t) => pool.advice().cost(t.native).saturating_mul(t.count),
            Work::Copy(r) => (r.width.saturating_mul(r.rows) / BYTES_PER_NANO).max(1),
            Work::Fill(p) => (p.bytes / BYTES_PER_NANO).max(1),
        }
    }

    /// Runs tiles `from..to`.
    ///
    /// # Safety
    /// - The operation's addresses are valid for it, and no other thread runs the same tiles.
    #[inline]
    pub(crate) unsafe fn run(&self, from: u64, to: u64) {
        // SAFETY: the operation's memory is valid until it is over, for every kind of operation
        // (the contract of this function).
        unsafe {
            match self {
                Work::Kernel(t) => t.run(from, to),
                Work::Copy(r) => r.run(from, to),
                Work::Fill(p) => p.run(from, to),
            }
        }
    }

    /// Runs all tiles, on this thread and on the pool's helpers.
    ///
    /// # Errors
    /// The message of the first panicking tile.
    ///
    /// # Safety
    /// - The operation's addresses are valid for it.
    #[inline]
    pub(crate) unsafe fn execute(&self, pool: &TilePool) -> Result<(), String> {
        let tiles = self.tiles();
        if tiles == 1 || pool.threads() == 1 {
            // SAFETY: the caller vouches for the operation's memory until it is over. A panic
            // passes through to the guard of the submission.
            unsafe { self.run(0, tiles) };
            return Ok(());
        }
        if tiles == 0 {
            return Ok(());
        }
        let nanos = self.nanos(pool);
        // SAFETY: the caller vouches for the operation's memory until it is over. The pool runs
        // each tile once.
        let sample = pool.run(tiles, nanos, &|from, to| unsafe { self.run(from, to) })?;
        if let Work::Kernel(t) = self {
            pool.advice().note_cost(t.native, sample.nanos, sample.tiles);
        }
        Ok(())
    }
}

/// Copies the pieces of one operation: short pieces are tiles, and longer ones have tiles of their
/// own.
///
/// # Errors
/// The message of the first panicking tile.
///
/// # Safety
/// - The addresses of all pieces are valid for them.
pub(crate) unsafe fn copy_pieces(copies: &Copies<'_>, pool: &TilePool) -> Result<(), String> {
    let pieces = copies.pieces();
    let (mut short, mut bytes) = (0, 0);
    for c in pieces {
        if c.bytes <= PIECE {
            (short, bytes) = (short + 1, bytes + c.bytes);
        } else {
            let long = Work::Copy(Rows::new(c.src, 0, c.dst, 0, c.bytes, 1));
            // SAFETY: the caller vouches for the piece.
            unsafe { long.execute(pool) }?;
        }
    }
    let run = |from: u64, to: u64| {
        for c in &pieces[from as usize..to as usize] {
            if c.bytes == 0 || c.bytes > PIECE {
                continue;
            }
            // SAFETY: the caller vouches for the piece. No other piece writes what it accesses, as
            // the type says, so threads may copy several at a time.
            unsafe {
                leasehold_core::copy_bytes(c.src as *const u8, c.dst as *mut u8, c.bytes as usize);
            }
        }
    };
    if short == 0 {
        return Ok(());
    }
    pool.run(pieces.len() as u64, (bytes / BYTES_PER_NANO).max(1), &run).map(drop)
}

impl<'a> Tiles<'a> {
    /// # Safety
    /// - The pipeline is of this backend.
    #[inline]
    unsafe fn new(dispatch: Dispatch<'a>) -> Self {
        let native = dispatch.pipeline.native;
        // SAFETY: the pipeline is of this backend (the contract).
        let run = unsafe { Entry::of(native) };
        let [x, y, z] = dispatch.grid;
        let count = u64::from(x).saturating_mul(u64::from(y)).saturating_mul(u64::from(z));
        Self { run, native, count, dispatch }
    }

    /// # Safety
    /// - The bindings are valid for the kernel, and no other thread runs the same tiles.
    #[inline]
    unsafe fn run(&self, from: u64, to: u64) {
        let d = &self.dispatch;
        let [gx, gy, _] = d.grid;
        with_scratch(d.shared, |shared| {
            // SAFETY: the bindings are valid (the contract of this function). `with_scratch` lends
            // `shared` to these tiles alone.
            let mut args = unsafe {
                CpuArgs::new((d.grid, d.block), d.bindings, d.params, (shared, d.shared))
            };
            let mut tile = [0; 3];
            if from != 0 {
                let (x, y) = (u64::from(gx), u64::from(gy));
                tile = [(from % x) as u32, (from / x % y) as u32, (from / x / y) as u32];
            }
            for _ in from..to {
                args.set_tile(tile);
                // SAFETY: the bindings are valid for this kernel, and no other thread runs this
                // tile (the contract of this function).
                unsafe { self.run.call(&args) };
                tile[0] += 1;
                if tile[0] == gx {
                    tile[0] = 0;
                    tile[1] += 1;
                    if tile[1] == gy {
                        tile[1] = 0;
                        tile[2] = tile[2].wrapping_add(1);
                    }
                }
            }
        });
    }
}

impl Rows {
    fn new(src: u64, src_pitch: u64, dst: u64, dst_pitch: u64, width: u64, rows: u64) -> Self {
        let (mut width, mut rows) = (width, rows);
        if rows > 1 && src_pitch == width && dst_pitch == width {
            width = width.saturating_mul(rows);
            rows = 1;
        }
        if width == 0 || rows == 0 {
            (width, rows) = (0, 0);
        }
        let (pieces, rows_per_piece) = if width >= PIECE {
            (width.div_ceil(PIECE), 1)
        } else {
            (0, (PIECE / width.max(1)).max(1))
        };
        Self { src, src_pitch, dst, dst_pitch, width, rows, pieces, rows_per_piece }
    }

    fn tiles(&self) -> u64 {
        if self.pieces == 0 {
            self.rows.div_ceil(self.rows_per_piece)
        } else {
            self.rows.saturating_mul(self.pieces)
        }
    }

    /// # Safety
    /// - Source and destination are valid for all rows.
    unsafe fn run(&self, from: u64, to: u64) {
        if self.width == 0 {
            return;
        }
        // SAFETY: source and destination are valid for all rows (the contract of this function),
        // and pieces lie within their rows. The copies tolerate overlap within a piece.
        unsafe {
            if self.pieces == 0 {
                let rows = from * self.rows_per_piece..(to * self.rows_per_piece).min(self.rows);
                for row in rows {
                    self.copy(row, 0, self.width);
                }
            } else {
                for tile in from..to {
                    let at = tile % self.pieces * PIECE;
                    self.copy(tile / self.pieces, at, (self.width - at).min(PIECE));
                }
            }
        }
    }

    /// # Safety
    /// - As [`run`](Self::run).
    #[inline]
    unsafe fn copy(&self, row: u64, at: u64, bytes: u64) {
        let src = (self.src + row * self.src_pitch + at) as *const u8;
        let dst = (self.dst + row * self.dst_pitch + at) as *mut u8;
        // SAFETY: the piece lies within ranges that are valid (the contract of this function).
        unsafe { leasehold_core::copy_bytes(src, dst, bytes as usize) };
    }
}

impl Pattern {
    fn new(dst: u64, bytes: u64, pattern: u32, width: u8) -> Self {
        let word = match width {
            1 => u64::from(pattern & 0xff) * 0x0101_0101_0101_0101,
            2 => u64::from(pattern & 0xffff) * 0x0001_0001_0001_0001,
            _ => u64::from(pattern) * 0x0000_0001_0000_0001,
        };
        Self { dst, bytes, word }
    }

    /// # Safety
    /// - The destination is valid for all bytes.
    unsafe fn run(&self, from: u64, to: u64) {
        // Pieces are multiples of eight bytes, so each begins with the pattern's first byte.
        let (from, to) = (from * PIECE, to.saturating_mul(PIECE).min(self.bytes));
        let len = (to - from) as usize;
        let at = (self.dst + from) as *mut u8;
        let block = self.word.to_le_bytes();
        // SAFETY: the destination is valid for all bytes (the contract of this function). Words are
        // written unaligned, the rest by bytes.
        unsafe {
            if block.iter().all(|&b| b == block[0]) {
                std::ptr::write_bytes(at, block[0], len);
                return;
            }
            let words = len / 8;
            let to = at.cast::<[u8; 8]>();
            for i in 0..words {
                to.add(i).write_unaligned(block);
            }
            std::ptr::copy_nonoverlapping(block.as_ptr(), at.add(words * 8), len % 8);
        }
    }
}
