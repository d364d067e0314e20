"use strict";
// A convenience: everything can be read without it.
const tables = document.querySelectorAll("details");
const button = document.getElementById("open-tables");
if (tables.length > 0) {
	button.hidden = false;
	button.addEventListener("click", () => tables.forEach((t) => { t.open = true; }));
}
