"""The instruction wordings of each family: some for training, others held out.

Held-out wordings use no word that training wordings lack (a test checks it): they are new sentences, not new words. All of
them are in lower case, so that a word is the same tokens wherever it stands.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Wordings:
    train: tuple[str, ...]
    heldout: tuple[str, ...]


WORDINGS: dict[str, Wordings] = {
    "rename": Wordings(
        train=(
            "rename {src} to {dst}.",
            "the file {src} has the wrong name. it should be {dst}.",
            "give {src} the new name {dst}.",
            "{dst} is the right name for {src}. fix it.",
            "please change the name of the file {src} to {dst}.",
            "we need the file {src} under the name {dst}.",
            "call {src} {dst} from now on.",
            "make {dst} out of {src}, the content stays.",
        ),
        heldout=(
            "from now on the file {src} should have the name {dst}.",
            "{src} is the wrong name, {dst} is right. please rename it.",
        ),
    ),
    "archive": Wordings(
        train=(
            "make the folder {folder}, move {src} into it and write {value} to {log}.",
            "create {folder}. then put {src} there. then write the word {value} in the new file {log}.",
            "move {src} to the new folder {folder} and note {value} in {log}.",
            "{src} belongs in {folder}, a folder to create. save the word {value} as {log}.",
            "we need a folder {folder} with {src} in it. {log} should say {value}.",
            "put {src} away: create the folder {folder}, move it there, then put {value} in {log}.",
            "the new folder {folder} takes {src}. its note {log} must say {value}.",
            "please create {folder}, move the file {src} there, and let {log} say {value}.",
        ),
        heldout=(
            "put the file {src} into the new folder {folder}. then {log} must say {value}.",
            "please make {folder}, put {src} there and save {value} in the file {log}.",
        ),
    ),
    "replace": Wordings(
        train=(
            "replace {old} by {new} in {src}.",
            "in {src} change every {old} to {new}.",
            "the word {old} in {src} should be {new} everywhere.",
            "write {new} for {old} all over the file {src}.",
            "each {old} in {src} is wrong. put {new} there.",
            "{src} says {old}, but it must say {new}.",
            "swap the word {old} for {new} in the file {src}.",
            "please let {src} say {new} in every place where it says {old}.",
        ),
        heldout=(
            "everywhere in the file {src} put {new} for the word {old}.",
            "the file {src} says {old} where it should say {new}. change every place.",
        ),
    ),
    "drop": Wordings(
        train=(
            "delete the lines with {value} from {src}.",
            "remove every line of {src} that says {value}.",
            "in {src} no line may have the word {value}. take those lines out.",
            "drop all lines of {src} with the word {value}.",
            "the lines about {value} must go from the file {src}.",
            "take each line with {value} out of {src}.",
            "{src} should keep only the lines without {value}.",
            "clean {src}: all lines that name {value} must go.",
        ),
        heldout=(
            "every line about {value} must go out of the file {src}.",
            "please remove from {src} those lines that have {value}.",
        ),
    ),
    "hunt": Wordings(
        train=(
            "find the file in {dir} that says {value} and delete it.",
            "one file in {dir} has the word {value}. remove this file.",
            "delete the one file under {dir} with {value} in it.",
            "some file in the folder {dir} names {value}. it must go.",
            "look in {dir} for the file about {value} and drop it.",
            "search {dir} for {value} and remove the file that has it.",
            "in the folder {dir} no file may say {value}. find it and take it out.",
            "which file of {dir} has {value}? remove that file.",
        ),
        heldout=(
            "look for {value} in the folder {dir}. the file with this word must go.",
            "search for the file of {dir} that names {value}, then delete it.",
        ),
    ),
    "json": Wordings(
        train=(
            "set {key} to {new} in {src}.",
            "in {src} change the value of {key} to {new}.",
            "the number {key} of {src} should be {new}.",
            "give {key} the value {new} in the json file {src}.",
            "{src} needs {key} {new}, the rest stays.",
            "put {new} as the value of {key} in {src}.",
            "{key} is wrong in {src}. the right number is {new}.",
            "please let {key} be {new} in the file {src}.",
        ),
        heldout=(
            "the json file {src} needs {new} as the value of {key}.",
            "in the file {src} the number {key} is wrong, change it to {new}.",
        ),
    ),
    "schema": Wordings(
        train=(
            "the field {old} in {src} has the wrong name. the schema {schema} has the right one.",
            "rename the field {old} of {src} to what {schema} requires.",
            "{schema} requires another name for {old}. fix {src}.",
            "fix {src}: by the schema {schema} the field {old} needs a new name.",
            "read {schema} and give the field {old} in {src} the name it requires.",
            "the file {src} fails the schema {schema}: {old} should have the required name.",
            "make {src} follow {schema}. only the name {old} is wrong.",
            "in {src} change {old} to the field that the schema {schema} needs.",
        ),
        heldout=(
            "read the schema {schema}: the field {old} of {src} should have another name. fix it.",
            "{src} fails, the name {old} is wrong. change it to what the schema {schema} requires.",
        ),
    ),
    "column": Wordings(
        train=(
            "write the {nth} column of {src} to {dst}.",
            "take column {n} of {src} and save it as {dst}.",
            "{dst} should have the {nth} column of {src}.",
            "put only the {nth} column of the table {src} in the new file {dst}.",
            "cut column {n} out of {src} into {dst}.",
            "from the table {src} we need column {n} in {dst}.",
            "create {dst} with the {nth} column of {src}.",
            "make the file {dst} from column {n} of the table {src}.",
        ),
        heldout=(
            "take the {nth} column from the file {src} and put it in {dst}.",
            "we need {dst} with only column {n} of the table {src}.",
        ),
    ),
    "sort": Wordings(
        train=(
            "sort {src} {how}.",
            "put the lines of {src} in order, {how}.",
            "the lines of {src} should be sorted {how}.",
            "bring the file {src} in order {how}.",
            "{src} must be sorted {how}. fix it.",
            "order all lines of the file {src} {how}.",
            "please sort the lines in {src} {how}.",
            "we need {src} in order, {how}.",
        ),
        heldout=(
            "please bring all lines of {src} in order, {how}.",
            "the file {src} should be in order {how}. sort it.",
        ),
    ),
    "cli": Wordings(
        train=(
            "the script {script} reads the wrong file. it should read {dst}.",
            "fix {script}: it must use {dst}.",
            "make the script {script} read {dst}.",
            "{script} fails because of a wrong name. the right file is {dst}.",
            "change the script {script} so that it uses {dst}.",
            "let {script} read the file {dst}, the rest stays.",
            "{dst} is the file that {script} should read. fix the script.",
            "the command in {script} needs {dst} and fails. fix this name.",
        ),
        heldout=(
            "the script {script} fails. change it so that it should use the file {dst}.",
            "fix the name in {script}: {dst} is the file that the command must read.",
        ),
    ),
}

# How a sort is asked for, by option of `sort`: training phrases, then held-out ones.
SORT_PHRASES: dict[str, Wordings] = {
    "-u": Wordings(
        train=("without doubles", "each line only once", "and drop the doubles", "with no line twice"),
        heldout=("and with no doubles", "every line only once"),
    ),
    "-r": Wordings(
        train=("from z to a", "in reverse", "the last word first", "backwards"),
        heldout=("in reverse, from z to a", "with the last word first"),
    ),
}
