//! What the emulator must know of a compiled library before it is loaded: the table of its kernels,
//! and the names that an object file leaves open. Any bytes are safe to read.
//!
//! This module must not know how the file was made.

/// A 64-bit little-endian ELF file.
pub(crate) struct Elf<'a> {
    bytes: &'a [u8],
}

/// A section: its name's place, kind, address, place, size, and the section that belongs to it.
#[derive(Debug, Clone, Copy)]
struct Section<'a> {
    name: usize,
    kind: u32,
    addr: u64,
    data: &'a [u8],
    link: usize,
}

/// A symbol.
struct Symbol<'a> {
    name: &'a str,
    kind: u8,
    global: bool,
    section: u16,
    value: u64,
}

const RELA: u32 = 4;
const NO_BITS: u32 = 8;
const SYMBOLS: u32 = 2;
const FUNCTION: u8 = 2;
const THREAD_LOCAL: u8 = 6;

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let mut wide = [0; 8];
    wide[..N].copy_from_slice(bytes.get(at..at.checked_add(N)?)?);
    Some(u64::from_le_bytes(wide))
}

fn text(bytes: &[u8], at: usize) -> Option<&str> {
    let rest = bytes.get(at..)?;
    std::str::from_utf8(&rest[..rest.iter().position(|&b| b == 0)?]).ok()
}

impl<'a> Elf<'a> {
    /// A file's bytes, if they begin as such a file does.
    pub(crate) fn new(bytes: &'a [u8]) -> Option<Self> {
        bytes.starts_with(b"\x7fELF\x02\x01").then_some(Self { bytes })
    }

    fn sections(&self) -> Option<Vec<Section<'a>>> {
        let (table, each) = (number::<8>(self.bytes, 40)?, number::<2>(self.bytes, 58)?);
        let count = number::<2>(self.bytes, 60)?;
        (0..count)
            .map(|i| {
                let at = usize::try_from(table.checked_add(i * each)?).ok()?;
                let word = |offset| number::<8>(self.bytes, at.checked_add(offset)?);
                let half = |offset| number::<4>(self.bytes, at.checked_add(offset)?);
                let kind = half(4)? as u32;
                let from = usize::try_from(word(24)?).ok()?;
                let size = usize::try_from(word(32)?).ok()?;
                let data = match kind {
                    NO_BITS => &[],
                    _ => self.bytes.get(from..from.checked_add(size)?)?,
                };
                let (name, link) = (half(0)? as usize, half(40)? as usize);
                Some(Section { name, kind, addr: word(16)?, data, link })
            })
            .collect()
    }

    fn section(&self, sections: &[Section<'a>], name: &str) -> Option<Section<'a>> {
        let names = sections.get(number::<2>(self.bytes, 62)? as usize)?.data;
        sections.iter().copied().find(|s| text(names, s.name) == Some(name))
    }

    /// The symbols of the linker's table.
    fn symbols(sections: &[Section<'a>]) -> Option<Vec<Symbol<'a>>> {
        let table = sections.iter().find(|s| s.kind == SYMBOLS)?;
        let names = sections.get(table.link)?.data;
        table
            .data
            .chunks_exact(24)
            .map(|s| {
                Some(Symbol {
                    name: text(names, number::<4>(s, 0)? as usize)?,
                    kind: s[4] & 15,
                    global: s[4] >> 4 != 0,
                    section: number::<2>(s, 6)? as u16,
                    value: number::<8>(s, 8)?,
                })
            })
            .collect()
    }

    /// The variables of threads that an object file uses and does not define.
    pub(crate) fn open_thread_locals(&self) -> Option<Vec<&'a str>> {
        let symbols = Self::symbols(&self.sections()?)?;
        let open = |s: &Symbol<'a>| s.section == 0 && s.kind == THREAD_LOCAL;
        Some(symbols.iter().filter(|s| open(s)).map(|s| s.name).collect())
    }

    /// The records of `size` bytes in the section `name` of a shared library, each with the name of
    /// the function that its first word points to. A local function has no name.
    pub(crate) fn records(
        &self,
        name: &str,
        size: usize,
    ) -> Option<Vec<(Option<&'a str>, &'a [u8])>> {
        let sections = self.sections()?;
        let Some(table) = self.section(&sections, name) else { return Some(Vec::new()) };
        let symbols = Self::symbols(&sections)?;
        let relocations: Vec<(u64, u64)> = sections
            .iter()
            .filter(|s| s.kind == RELA)
            .flat_map(|s| s.data.chunks_exact(24))
            .filter_map(|r| Some((number::<8>(r, 0)?, number::<8>(r, 16)?)))
            .collect();
        let records = table.data.chunks_exact(size).enumerate();
        records
            .map(|(i, record)| {
                let at = table.addr + (i * size) as u64;
                let (_, function) = relocations.iter().find(|r| r.0 == at)?;
                let named =
                    symbols.iter().find(|s| s.value == *function && s.kind == FUNCTION && s.global);
                Some((named.map(|s| s.name), record))
            })
            .collect()
    }
}
