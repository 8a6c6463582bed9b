# Flattens JSON to lines of a path, a tab and a value: {"modes":{"graph":{"p50":1.5}},"ids":[7]} gives
#   modes.graph.p50<TAB>1.5
#   ids[0]<TAB>7
# One object or array in the whole input; strings keep their escapes. For `bench/decode.sh`, which needs no other tool.
{ text = text $0 " " }
END { pos = 1; value("") }
function space() { while (substr(text, pos, 1) ~ /[ \t\r]/) pos++ }
function string(   start) {
    start = ++pos
    while (pos <= length(text) && substr(text, pos, 1) != "\"") pos += substr(text, pos, 1) == "\\" ? 2 : 1
    pos++
    return substr(text, start, pos - start - 1)
}
function value(path,   c, key, i, start) {
    space()
    c = substr(text, pos, 1)
    if (c == "{") {
        pos++
        for (space(); pos <= length(text) && substr(text, pos, 1) != "}"; space()) {
            if (substr(text, pos, 1) == ",") { pos++; space() }
            key = string(); space(); pos++
            value(path == "" ? key : path "." key)
        }
        pos++
    } else if (c == "[") {
        pos++
        i = 0
        for (space(); pos <= length(text) && substr(text, pos, 1) != "]"; space()) {
            if (substr(text, pos, 1) == ",") pos++
            value(path "[" i++ "]")
        }
        pos++
    } else if (c == "\"") {
        print path "\t" string()
    } else {
        start = pos
        while (pos <= length(text) && substr(text, pos, 1) !~ /[],} \t\r]/) pos++
        if (pos == start) exit 1
        print path "\t" substr(text, start, pos - start)
    }
}
